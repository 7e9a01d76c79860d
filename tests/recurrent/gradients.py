"""Results and gradients of a function of arrays, to compare a pipeline's with a plain model's."""

import numpy as np
import tensorflow as tf


def with_gradients(build, *values, eagerly=False):
    """The list that `build` returns for values, and gradients of half the sum of its first one."""
    variables = [tf.Variable(value) for value in values]

    def run():
        with tf.GradientTape() as tape:
            results = build(*map(tf.convert_to_tensor, variables))
            total = tf.reduce_sum(0.5 * results[0])
        grads = tape.gradient(total, variables)
        return [results, [None if g is None else tf.convert_to_tensor(g) for g in grads]]

    return (run if eagerly else tf.function(run, autograph=False))()


def assert_same(got, want, tolerance=1e-4):
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            # Else an infinite number would allow every difference.
            assert np.isfinite(b).all()
            # The last bit of a float32 is 1e-7 of it. Sums in another order differ by some of the
            # last bits of the largest elements, also where the sum is near zero.
            atol = max(tolerance, 1e-6 * np.abs(b).max())
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=atol)
