"""Performs the actions of a schedule, one by one or as a loop."""
