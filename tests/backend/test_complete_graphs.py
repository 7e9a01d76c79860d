"""Complete graphs: operations lie beside their inputs, and carried gradients cost nothing."""

import tensorflow as tf

from pipemesh.backend import complete_graphs
from pipemesh.backend.complete_graphs import (
    pass_variables_as_one,
    place_beside_inputs,
    skip_passing_on,
)
from pipemesh.backend.gradients import attach_gradient


def test_devices_and_colocation_are_kept_and_else_the_largest_input_decides():
    def build():
        with tf.device("CPU:0"):
            rate = tf.zeros([], name="rate")
        with tf.device("CPU:1"):
            x = tf.zeros([9])
        tf.identity(tf.multiply(rate, x, name="scaled"), name="next")
        with tf.device("CPU:0"):
            tf.identity(x, name="moved")
        with tf.compat.v1.get_default_graph().colocate_with(x.op):
            tf.identity(x, name="beside")
        tf.constant(1, name="alone")

    with tf.Graph().as_default() as graph:
        build()
        place_beside_inputs(graph)
    found = {operation.name: operation.device[-5:] for operation in graph.get_operations()}
    assert (found["scaled"], found["next"], found["moved"], found["alone"]) == (
        *("CPU:1", "CPU:1", "CPU:0", ""),
    )


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


def test_what_feeds_a_graph_lies_where_it_is_said():
    far = "/job:worker/replica:0/task:1/device:CPU:0"
    kept = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def fed(batch):
        tf.identity(batch, name="rows")
        tf.identity(kept, name="kept")
        place_beside_inputs(tf.compat.v1.get_default_graph(), far)

    graph = fed.get_concrete_function(tf.TensorSpec([4])).graph
    assert graph.get_operation_by_name("rows").device == far
    assert not graph.get_operation_by_name("kept").device.startswith("/job:worker")


def test_calls_that_carried_a_gradient_are_skipped():
    @tf.function(autograph=False)
    def differentiated(x, y):
        passed = attach_gradient([x * 2.0, y * 3.0], [x, y], lambda grads: grads, True)
        result = tf.add_n(passed, name="sum")
        gradients = tf.gradients(result, [x, y])
        skip_passing_on(tf.compat.v1.get_default_graph())
        return result, gradients

    spec = tf.TensorSpec([])
    function = differentiated.get_concrete_function(spec, spec)
    inputs = function.graph.get_operation_by_name("sum").inputs
    assert [tensor.op.type for tensor in inputs] == ["Mul", "Mul"]
    total, gradients = function(tf.constant(1.0), tf.constant(2.0))
    assert (total.numpy(), [g.numpy() for g in gradients]) == (8.0, [1.0, 1.0])


def test_variables_of_a_worker_are_passed_as_one(monkeypatch):
    """Here the second device counts as a worker's. Users of a variable keep their order."""
    monkeypatch.setattr(complete_graphs, "task_of", lambda device: 0 if "CPU:1" in device else None)
    with tf.device("CPU:1"):
        x, y = tf.Variable(1.0), tf.Variable([2.0, 3.0])
    near = tf.Variable(5.0)

    @tf.function(autograph=False)
    def step(factor):
        before = x.read_value()
        x.assign_add(factor * near)
        y.assign(y * x)
        x.assign(x * 2.0)
        after = y.read_value()
        pass_variables_as_one(tf.compat.v1.get_default_graph())
        return before, after

    # Each has a graph of its own.
    for factor, expected in ((1.0, [12.0, 18.0]), (2.0, [22.0, 33.0])):
        x.assign(1.0)
        y.assign([2.0, 3.0])
        before, after = step(factor)
        assert (before.numpy(), after.numpy().tolist(), x.numpy()) == (1.0, expected, expected[0])
        captured = step.get_concrete_function(factor).captured_inputs
        assert sorted(tuple(tensor.shape) for tensor in captured) == [(), (2,)]
