"""What the examples on named dims share: a network as data, its trainer, and the command line."""
