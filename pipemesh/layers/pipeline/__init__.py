"""`PipeliningLayer` and `SeqLayer`: stages on their devices, with microbatches and without."""
