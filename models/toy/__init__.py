"""A two-layer network that learns the identity, on named dims."""
