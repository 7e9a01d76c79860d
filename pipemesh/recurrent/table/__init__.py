"""Performs the actions of a schedule, one after the other."""
