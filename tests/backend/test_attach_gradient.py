"""Gradients of one's own, with and without tensors that stay on their devices."""

import pytest
import tensorflow as tf

from pipemesh.backend.attach_gradient import attach_gradient


@pytest.mark.parametrize("across_devices", [False, True])
@pytest.mark.parametrize("mode", ["eager", "tape", "tf.gradients"])
def test_gradients_flow_only_as_backward_says(mode, across_devices):
    def run(a, b):
        outputs = [tf.stop_gradient(a + b), tf.stop_gradient(a * b)]

        def backward(grads):
            return [2 * grads[0] + 3 * grads[1], None]

        if mode == "tf.gradients":
            attached = attach_gradient(outputs, [a, b], backward, across_devices)
            (grad,) = tf.gradients(attached[0] + 5 * attached[1], [a])
            return [*attached, grad], None
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            attached = attach_gradient(outputs, [a, b], backward, across_devices)
            loss = attached[0] + 5 * attached[1]
        found, none = tape.gradient(loss, [a, b])
        return [*attached, found], none

    run = run if mode == "eager" else tf.function(run, autograph=False)
    values, none = run(tf.constant(3.0), tf.constant(4.0))
    assert [value.numpy() for value in values] == [7, 12, 17] and none is None


def test_in_a_graph_each_tensor_stays_on_its_device():
    devices = [d.name for d in tf.config.list_logical_devices("CPU")][:2]

    @tf.function(autograph=False)
    def run(x):
        parts = []
        for device in devices:
            with tf.device(device):
                parts.append(tf.stop_gradient(tf.sin(x)))
        attached = attach_gradient(parts, [x], lambda grads: [tf.add_n(grads)], True)
        (grad,) = tf.gradients(attached, [x])
        return grad

    graph = run.get_concrete_function(tf.TensorSpec([])).graph
    (call,) = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
    assert len(call.outputs) == len(devices) + 1
    assert "IdentityN" not in {op.type for op in graph.get_operations()}
    assert run(tf.constant(0.0)).numpy() == len(devices)


@pytest.mark.parametrize("mode", ["tape", "tf.gradients"])
def test_a_gradient_of_one_device_is_computed_there(mode):
    """Norms and attention said nothing, so the device of the whole gradient had all slices'."""
    here, there = [d.name for d in tf.config.list_logical_devices("CPU")][:2]

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tf.device(there):
                output = tf.stop_gradient(tf.sin(x))
            (y,) = attach_gradient([output], [x], lambda grads: [grads[0] * tf.cos(x)], False)
        with tf.device(here):
            return tape.gradient(y, x) if mode == "tape" else tf.gradients(y, x)[0]

    graph = run.get_concrete_function(tf.TensorSpec([])).graph
    lie = {op.type: op.device for op in graph.get_operations()}
    assert lie["Cos"] == lie["IdentityN"] == lie["Sin"] == there
    assert run(tf.constant(0.0)).numpy() == 1
