"""Figures of a model on this machine, measured in training steps of its own."""
