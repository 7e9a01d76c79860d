"""Figures of a model on this machine, measured in its own training steps."""
