"""Operations without a device lie where their inputs are."""

import tensorflow as tf

from pipemesh.backend.beside_inputs import place_beside_inputs


def devices(function):
    """The device of each named operation of a graph, after placement."""
    with tf.Graph().as_default() as graph:
        function()
        place_beside_inputs(graph)
    return {operation.name: operation.device[-5:] for operation in graph.get_operations()}


def test_the_largest_input_decides():
    def build():
        with tf.device("CPU:0"):
            rate = tf.zeros([], name="rate")
        with tf.device("CPU:1"):
            gradient = tf.zeros([9], name="gradient")
        tf.identity(tf.multiply(rate, gradient, name="scaled"), name="next")

    found = devices(build)
    assert (found["scaled"], found["next"]) == ("CPU:1", "CPU:1")


def test_devices_and_colocation_are_kept():
    def build():
        with tf.device("CPU:1"):
            x = tf.zeros([9])
        with tf.device("CPU:0"):
            tf.identity(x, name="moved")
        with tf.compat.v1.get_default_graph().colocate_with(x.op):
            tf.identity(x, name="beside")
        tf.constant(1, name="alone")

    found = devices(build)
    assert found["moved"] == "CPU:0"
    assert found["alone"] == ""


def test_a_loop_returns_values_where_they_entered():
    @tf.function(autograph=False)
    def looped():
        with tf.device("CPU:0"):
            x, y = tf.zeros([2]), tf.zeros([3])
        x, y = tf.while_loop(lambda x, y: x[0] < 1.0, lambda x, y: (x + 1.0, y), (x, y))
        tf.identity(x, name="after")
        place_beside_inputs(tf.compat.v1.get_default_graph())

    operation = looped.get_concrete_function().graph.get_operation_by_name("after")
    assert operation.device.endswith("CPU:0")
