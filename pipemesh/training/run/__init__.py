"""The loop of training, and what it tells."""
