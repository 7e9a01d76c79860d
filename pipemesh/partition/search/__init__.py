"""The algorithms that find the boundaries; `partition/README.md` explains them."""
