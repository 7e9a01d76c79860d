"""Classifiers of handwritten digits: layers of lingvo, a pipeline of them, and Keras."""
