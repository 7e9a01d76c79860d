"""The graph of a stage: traced once and cut into passes."""
