"""TensorFlow below its public surface: devices, processes, purity, gradients as a whole."""

# First: it says what is missing.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip
