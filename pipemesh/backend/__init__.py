"""TensorFlow below its public surface: devices, processes, gradients, graphs, collectives."""

# First: it says what is missing.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip
