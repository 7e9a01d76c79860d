"""The graphs that TensorFlow executes."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from pipemesh.backend.executed_graphs import collected_graphs, registered_kernels


def kinds(metadata):
    return {
        node.op
        for functions in metadata.function_graphs
        for graph in functions.partition_graphs
        for node in graph.node
    }


def test_functions_that_run_for_the_first_time_inside_are_collected():
    before, inside = tf.function(tf.tan), tf.function(tf.atan)
    x = tf.random.stateless_uniform([2], [1, 2])
    before(x)
    with collected_graphs() as metadata:
        before(x)
        inside(x)
        assert not metadata.function_graphs, "it is filled when the context ends"
    assert "Atan" in kinds(metadata) and "Tan" not in kinds(metadata)


def test_what_was_collected_before_is_not_told_again():
    x = tf.random.stateless_uniform([2], [1, 2])
    context.context().enable_graph_collection()
    tf.function(tf.cosh)(x)
    with collected_graphs() as metadata:
        tf.function(tf.asinh)(x)
    assert "Asinh" in kinds(metadata) and "Cosh" not in kinds(metadata)


def test_nothing_is_collected_after_an_error():
    x = tf.random.stateless_uniform([2], [1, 2])
    with pytest.raises(ValueError, match="mine"), collected_graphs():
        raise ValueError("mine")
    tf.function(tf.sinh)(x)
    assert not kinds(context.context().export_run_metadata())


def test_kernels_are_told_with_their_devices():
    assert "CPU" in {kernel.device_type for kernel in registered_kernels("MatMul")}
    assert {kernel.op for kernel in registered_kernels("MatMul")} == {"MatMul"}
    assert registered_kernels("NoSuchOperation") == []
