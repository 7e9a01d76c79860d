"""Tapes, and custom gradients of tensors that stay on their devices."""

import gc
import threading

import pytest
import tensorflow as tf

from pipemesh.backend.gradients import (
    Sources,
    attach_gradient,
    custom_gradient,
    is_recorded,
    is_recorded_twice,
    no_gradients,
    outermost_tape,
    record_call,
    unrecorded,
    variables_read,
    with_gradient,
    without_colocation,
)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_recorded_call_has_the_gradient_that_it_says(in_graph):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with unrecorded():
                y = tf.identity(x) ** 2
            record_call([y], [x], lambda grad: [10 * grad])
        return tape.gradient(y, x)

    assert (tf.function(run) if in_graph else run)(tf.constant(3.0)).numpy() == 10


def test_it_is_known_whether_tapes_record_and_how_often():
    x, other = tf.constant(3.0), tf.constant(4.0)
    assert not is_recorded([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert is_recorded([other, x]) and not is_recorded([other])
        assert not is_recorded_twice([x])
        with tf.GradientTape() as second:
            second.watch(x)
            assert is_recorded_twice([other, x]) and not is_recorded_twice([other])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        assert is_recorded_twice([x])


def test_trainable_variables_that_are_read_are_noted():
    trainable, other = tf.Variable(1.0), tf.Variable(2.0, trainable=False)
    with variables_read() as reads:
        trainable + other
    assert [variable.ref() for variable in reads.watched_variables()] == [trainable.ref()]


def test_the_outermost_tape_began_first_in_its_thread():
    assert outermost_tape() is None
    seen = []
    with tf.GradientTape() as first:
        thread = threading.Thread(target=lambda: seen.append(outermost_tape()))
        thread.start()
        thread.join()
        assert seen == [None]
        with tf.GradientTape():
            assert outermost_tape() is first
        with first.stop_recording():
            assert outermost_tape() is None
        assert outermost_tape() is first
    assert outermost_tape() is None
    with pytest.raises(ZeroDivisionError), tf.GradientTape():
        raise ZeroDivisionError
    assert outermost_tape() is None


@pytest.mark.parametrize("in_graph", [False, True])
def test_gradients_of_all_groups_are_computed_at_once(in_graph):
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


def test_without_a_gradient_backward_is_not_called():
    x, number = tf.constant(3.0), tf.constant(1)
    with tf.GradientTape() as tape:
        tape.watch(x)
        same, y = with_gradient(
            [number, 2 * tf.stop_gradient(x)], "CPU:0", [Sources([x], "CPU:0")], lambda grads: 1 / 0
        )
        (alone,) = with_gradient([number], "CPU:0", [Sources([x], "CPU:0")], lambda grads: 1 / 0)
        with no_gradients():
            (z,) = attach_gradient([2 * x], [x], lambda grads: 1 / 0, False)
        total = tf.cast(alone, tf.float32) + tf.stop_gradient(y) + z
    assert same is alone is number and (float(y), float(z)) == (6, 6)
    assert tape.gradient(total, x).numpy() == 2


def test_without_colocation_device_scopes_place_operations():
    with tf.Graph().as_default():
        with tf.device("CPU:0"):
            x = tf.zeros([])
        with tf.compat.v1.colocate_with(x), without_colocation(), tf.device("CPU:1"):
            y = tf.ones([])
    assert y.op.device.endswith("CPU:1") and y.op.colocation_groups() == [
        b"loc:@" + y.op.name.encode()
    ]


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
def test_a_gradient_of_one_device_is_computed_on_it(mode):
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


def test_a_graph_does_not_free_gradients_of_other_threads():
    """Of cores that run without a graph, each traces functions in its thread."""
    graph, found = tf.Graph(), []

    def other():
        with graph.as_default():
            x = tf.constant(1.0)
            found.extend([tf.nn.silu(x), x])

    @custom_gradient
    def function(x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return 2.0 * x, lambda grad: grad

    with tf.Graph().as_default():
        function(tf.constant(1.0))
    gc.collect()
    with graph.as_default():
        assert tf.gradients(*found)[0] is not None
