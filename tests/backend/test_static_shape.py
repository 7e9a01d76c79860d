"""Shapes, and dtypes of variables behind their handles."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.static_shape import dtype_behind, join_from_front, num_bytes, split_to_front


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int64])
def test_the_dtype_of_a_variable_is_known_by_its_handle(dtype):
    variable = tf.Variable(tf.zeros([2], dtype))

    @tf.function
    def run():
        variable.read_value()
        (captured,) = tf.compat.v1.get_default_graph().internal_captures
        assert dtype_behind(captured) == dtype

    run.get_concrete_function()
    with tf.Graph().as_default():
        assert dtype_behind(tf.Variable(tf.zeros([2], dtype)).handle) == dtype


def test_other_handles_have_no_dtype():
    with tf.Graph().as_default():
        assert dtype_behind(tf.constant(1.0)) is None
        assert dtype_behind(tf.compat.v1.placeholder(tf.resource)) is None


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_a_dim_are_in_front_and_join_again(dim):
    whole = tf.reshape(tf.range(4 * 6 * 2), [4, 6, 2])
    parts = split_to_front(whole, dim, 2)
    np.testing.assert_array_equal(parts, tf.stack(tf.split(whole, 2, dim)))
    np.testing.assert_array_equal(join_from_front(parts, dim), whole)


def test_bytes_follow_from_shapes_and_dtypes():
    assert num_bytes([tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int64)]) == 32
