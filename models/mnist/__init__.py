"""The MNIST network of Mesh TensorFlow's README, on named dims."""
