"""Frozen weights, given through `tf.stop_gradient`: no backward pass for them, nor below them."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Options, pipeline_loss
from pipemesh.schedule.builders import build
from tests.conformance.remat_cases import REMAT
from tests.recurrent import stack

FROZEN = [0, 1]


def pipelined(theta, schedule, replicas=1, **options):
    """Loss and weight of the pipeline; no gradient goes to the labels either."""
    loss, (weights, _), _ = pipeline_loss(
        stack.stages(theta, schedule, replicas),
        [tf.constant(stack.IDS), tf.stop_gradient(tf.constant(stack.LABELS))],
        schedule,
        step=tf.constant(stack.STEP, tf.int64),
        options=Options(**options),
    )
    return loss, tf.reduce_sum(weights)


def results(model, frozen=FROZEN):
    """Returns the loss, the gradients by layer, and the number of matmuls of one step."""
    variables = {
        name: tf.Variable(stack.VALUES[name])
        if name == "embedding"
        else [tf.Variable(value) for value in stack.VALUES[name]]
        for name in stack.VALUES
    }

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            theta = tf.nest.map_structure(tf.convert_to_tensor, variables)
            if frozen:
                theta["embedding"] = tf.stop_gradient(theta["embedding"])
                for name in ("weights", "biases"):
                    for i in frozen:
                        theta[name][i] = tf.stop_gradient(theta[name][i])
            loss, weight, *_ = model(theta)
            mean = loss / weight
        return loss, tape.gradient(mean, variables)

    graph = run.get_concrete_function().graph.as_graph_def()
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    counts = collections.Counter(node.op for body in bodies for node in body)
    return *stack.as_numpy(run()), sum(counts[name] for name in counts if "MatMul" in name)


CASES = {
    "actions": (build("1f1b", 2, 3), {"loop": False}),
    "halves": (build("zb_h1", 4, 3), {"loop": False, "remat": "full"}),
    "halves, twice": (build("zb_h1", 2, 3), {"loop": False, "remat": "twice"}),
    "loop": (build("interleaved", 2, 6), {"loop": True}),
    "loop of halves": (build("zb_h1", 2, 6), {"loop": True, "remat": REMAT["selective"]}),
    "replicas": (build("gpipe", 4, 2), {"loop": False, "replicas": 2}),
    "checked": (build("1f1b", 2, 3), {"loop": False, "check_numerics": "all"}),
}


@pytest.mark.parametrize(("schedule", "options"), CASES.values(), ids=CASES)
def test_frozen_weights_get_no_backward_pass(schedule, options):
    loss, grads, matmuls = results(lambda theta: pipelined(theta, schedule, **options))
    wanted_loss, wanted, _ = results(stack.plain)
    np.testing.assert_allclose(loss, wanted_loss, rtol=2e-5)
    assert grads["embedding"].item() is None
    for name in ("weights", "biases"):
        for i, (grad, want) in enumerate(zip(grads[name], wanted[name], strict=True)):
            assert (grad.dtype == object) == (i in FROZEN), (name, i)
            if i not in FROZEN:
                np.testing.assert_allclose(grad, want, rtol=2e-5, atol=1e-5)
    *_, all_matmuls = results(lambda theta: pipelined(theta, schedule, **options), frozen=())
    # Without eight products of the frozen layers, and the first product's gradient of its input.
    assert all_matmuls - matmuls >= 9
