"""One program for all: the same operations on every core, slices and indices as data."""
