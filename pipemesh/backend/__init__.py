"""TensorFlow below its public surface: devices, processes, purity, gradients as a whole."""
