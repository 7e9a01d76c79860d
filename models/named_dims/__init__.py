"""Shared code of the examples on named dims: a network as data, its trainer, and the
command line.
"""
