"""Classifiers of handwritten digits: lingvo layers, a pipeline of them, and Keras."""
