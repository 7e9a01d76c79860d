"""`PipeliningLayer` and `SeqLayer`: stages on their devices, with and without microbatches."""
