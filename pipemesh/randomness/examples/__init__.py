"""Whose the elements of a tensor are, found on a graph."""
