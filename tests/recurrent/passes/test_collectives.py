"""Collectives inside of actions: seen on the graph, because there is no GPU."""

import collections

import pytest
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.graphs import operations_within
from pipemesh.errors import PipelineError
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.schedule import gpipe, one_f_one_b

DEVICES = ["GPU:0", "GPU:1"]


def split(theta, carry, inputs, microbatch, step):
    """A product whose inner dim is split over two devices."""
    halves = []
    for device, x, w in zip(DEVICES, tf.split(inputs[0], 2, 1), tf.split(theta[0], 2), strict=True):
        with tf.device(device):
            halves.append(tf.matmul(x, w))
    # In a graph of TF1 nobody asks whether there are such devices.
    with tf.Graph().as_default():
        lowering = PlacementLowering(Mesh.from_text("model:2"), LayoutRules(), DEVICES)
    whole = lowering.all_reduce(tuple(halves), ["model"], "sum")
    # Both halves are asked for by nobody but the reduction.
    return [tf.tanh(whole[0])], []


def summed(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(inputs[0])], []


def graph_of(forward, schedule, **options):
    @tf.function(autograph=False)
    def run(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            stages = [
                Stage("split", forward, [w], [], DEVICES[0]),
                Stage("summed", summed, [], [], DEVICES[1]),
            ]
            loss, _, _ = pipeline_loss(
                stages, [x], schedule, options=Options(check_numerics="off", **options)
            )
        return loss, tape.gradient(loss, w)

    x, w = tf.TensorSpec([8, 4]), tf.TensorSpec([4, 3])
    return run.get_concrete_function(x, w).graph


def groups(graph):
    """How many operations share each name."""
    return collections.Counter(
        (inside, operation.get_attr("shared_name"))
        for inside, operation in operations_within(graph)
        if operation.type == "NcclAllReduce"
    )


@pytest.mark.parametrize(("remat", "number"), [("none", 1), ("full", 2)])
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("loop", "count"), [(False, 4), (True, 1)])
def test_each_action_has_collectives_of_its_own(build, remat, number, loop, count):
    """In a loop, the kinds of actions; TensorFlow tells its repetitions apart."""
    found = groups(graph_of(split, build(2, 4), remat=remat, loop=loop))
    # One where the forward pass is computed again; that of the gradient is no reduction.
    assert len({name for _, name in found}) == count * number
    # No device waits for one that does not come.
    assert set(found.values()) == {2}


def test_collectives_of_an_action_that_is_not_due_are_dead():
    """Even if an input is a constant: the other devices of the group would not come."""

    def masked(theta, carry, inputs, microbatch, step):
        return split(theta, carry, [tf.ones_like(inputs[0])], microbatch, step)

    graph = graph_of(masked, one_f_one_b(2, 4), loop=True)
    collectives = [op for _, op in operations_within(graph) if op.type == "NcclAllReduce"]
    assert len(collectives) >= 2
    for collective in collectives:
        # An argument of the action's function, which hangs on the token of its device.
        assert [op.type for op in collective.control_inputs] == ["Placeholder"]


def test_a_collective_in_a_function_is_an_error():
    @tf.function(autograph=False)
    def inner(x):
        return tf.stop_gradient(collectives.nccl_all_reduce([x, x], DEVICES, "sum")[0])

    def hidden(theta, carry, inputs, microbatch, step):
        product = tf.matmul(inputs[0], theta[0])
        return [product + inner(product)], []

    with pytest.raises(PipelineError, match="NcclAllReduce operation, which has side effects"):
        graph_of(hidden, gpipe(2, 4))
