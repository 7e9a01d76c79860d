"""A table as one loop over its ticks, whose actions are data."""
