"""Dtypes of variables behind their handles."""

import pytest
import tensorflow as tf

from pipemesh.backend.static_shape import dtype_behind, num_bytes


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


def test_bytes_follow_from_shapes_and_dtypes():
    assert num_bytes([tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int64)]) == 32
