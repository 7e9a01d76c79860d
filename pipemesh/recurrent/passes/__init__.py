"""A stage, traced once and cut into its passes."""
