"""Gradients that are computed as a whole, for groups of tensors that stay on their devices."""

import pytest
import tensorflow as tf

from pipemesh.backend.gradient import Sources, with_gradient, without_colocation


@pytest.mark.parametrize("in_graph", [False, True])
def test_all_gradients_are_computed_at_once_and_each_group_picks_up_its_own(in_graph):
    calls = []

    def run(a, b, whole):
        with tf.GradientTape() as tape:
            tape.watch([a, b])

            def backward(grads):
                calls.append(grads)
                return [[2 * grads[0]], [3 * grads[0], None]]

            def checked(grads):
                return [None if grad is None else grad + 1 for grad in grads]

            sources = [Sources([a], "CPU:0"), Sources([b, whole], "CPU:0", checked)]
            output, number = with_gradient([a * b, whole], "CPU:0", sources, backward)
            assert number is whole
        return tape.gradient(output, [a, b])

    run = tf.function(run, autograph=False) if in_graph else run
    found = run(tf.constant(3.0), tf.constant(4.0), tf.constant(1))
    assert [value.numpy() for value in found] == [2, 4]
    assert len(calls) == 1 and calls[0][1] is None


def test_only_scalars_leave_the_device_of_a_group():
    devices = [d.name for d in tf.config.list_logical_devices("CPU")][:3]

    @tf.function(autograph=False)
    def run(a, b):
        given = []
        for x, device in zip((a, b), devices, strict=False):
            with tf.device(device):
                given.append(tf.identity(x))
        sources = [Sources([x], device) for x, device in zip(given, devices, strict=False)]
        (loss,) = with_gradient(
            [tf.zeros([])],
            devices[2],
            sources,
            lambda grads: [[tf.fill([7], grads[0])], [tf.fill([7], 2 * grads[0])]],
        )
        return loss, *tf.gradients(loss, given)

    graph = run.get_concrete_function(tf.TensorSpec([7]), tf.TensorSpec([7])).graph
    anchors = {op.device: op for op in graph.get_operations() if op.type == "IdentityN"}
    # Without a group's own operation all would be inputs of the one on the device of the outputs.
    assert {d[-5:] for d in anchors} == {d[-5:] for d in devices}
    met = next(op for d, op in anchors.items() if d[-5:] == devices[2][-5:])
    assert all(tensor.shape == [] for tensor in met.inputs)


def test_without_floating_outputs_they_come_back_as_they_are():
    x, number = tf.constant(3.0), tf.constant(1)

    def backward(grads):
        raise AssertionError("nobody asked for a gradient")

    with tf.GradientTape() as tape:
        tape.watch(x)
        (found,) = with_gradient([number], "CPU:0", [Sources([x], "CPU:0")], backward)
    assert found is number and tape.gradient(tf.cast(found, tf.float32), x) is None


def test_what_is_computed_only_for_a_value_asks_for_no_gradient():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        (y,) = with_gradient(
            [2 * tf.stop_gradient(x)], "CPU:0", [Sources([x], "CPU:0")], lambda grads: 1 / 0
        )
        z = tf.stop_gradient(y) + x
    assert y.numpy() == 6 and tape.gradient(z, x).numpy() == 1


def test_without_colocation_operations_lie_where_they_are_told_to():
    with tf.Graph().as_default():
        with tf.device("CPU:0"):
            x = tf.zeros([])
        with tf.compat.v1.colocate_with(x), without_colocation(), tf.device("CPU:1"):
            y = tf.ones([])
    assert y.op.device.endswith("CPU:1") and y.op.colocation_groups() == [
        b"loc:@" + y.op.name.encode()
    ]
