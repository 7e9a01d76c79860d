"""Tests of XLA support of functions, and of their fingerprints."""

import pytest
import tensorflow as tf

from pipemesh.backend.compiled import fingerprint, has_compiled_kernel, why_not_compiled

SPECS = [tf.TensorSpec([2, 3]), tf.TensorSpec([3, 2])]


def traced(run, specs=SPECS):
    return tf.function(run, autograph=False).get_concrete_function(*specs)


def product(a, b):
    return tf.matmul(a, b) + 1


def reordered(b, a):
    one = tf.constant(1.0, name="one")
    return tf.add(tf.identity(tf.matmul(b, a, name="product")), one, name="sum")


def in_loop(bound, add=1.0):
    def run(a, b):
        return tf.while_loop(lambda i, _: i < bound, lambda i, x: (i + 1, x + add), [0, a])[1]

    return run


def test_functions_that_compute_the_same_have_one_fingerprint():
    assert fingerprint(traced(product)) == fingerprint(traced(reordered))
    assert fingerprint(traced(in_loop(2))) == fingerprint(traced(in_loop(2)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (traced(product), traced(lambda a, b: tf.matmul(a, b) + 2)),
        (traced(product), traced(product, [tf.TensorSpec([4, 3]), SPECS[1]])),
        (traced(product), traced(lambda a, b: product(tf.transpose(b), tf.transpose(a)))),
        (traced(lambda a, b: [a, b]), traced(lambda a, b: [b, a], SPECS[::-1])),
        (traced(lambda a, b: tf.split(a, 2)[0]), traced(lambda a, b: tf.split(a, 2)[1])),
        (traced(in_loop(2)), traced(in_loop(3))),
        (traced(in_loop(2)), traced(in_loop(2, add=2.0))),
    ],
    ids=["constant", "shape", "operations", "arguments", "output", "condition", "body"],
)
def test_functions_that_differ_have_fingerprints_that_differ(one, other):
    assert fingerprint(one) != fingerprint(other)


def test_what_xla_does_not_take_is_told():
    assert has_compiled_kernel("MatMul", "CPU") and not has_compiled_kernel("StringLength", "CPU")
    assert why_not_compiled(traced(product), "CPU") is None
    unknown = traced(lambda a, b: tf.reshape(a, tf.cast(b[0], tf.int32)))
    assert "compile-time constant" in why_not_compiled(unknown, "CPU")
