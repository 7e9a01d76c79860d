"""Small stages, traced in the current graph, for tests of what is cut from them."""

import numpy as np
import tensorflow as tf

from pipemesh.randomness import layer_scope
from pipemesh.randomness.scope import WholeDraws
from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage

ROWS, WIDTH = 2, 3
_RNG = np.random.default_rng(0)
WEIGHTS = _RNG.normal(size=[2, WIDTH, WIDTH]).astype(np.float32)
X = _RNG.normal(size=[ROWS, WIDTH]).astype(np.float32)
DEVICES = ("CPU:1", "CPU:2")


def two_layers(theta, carry, inputs, microbatch, step):
    """Two products, each with a `tanh`, and a count."""
    with layer_scope("first"):
        h = tf.tanh(tf.matmul(inputs[0], theta[0]))
    with layer_scope("second"):
        y = tf.tanh(tf.matmul(h, theta[1]))
    return [y], [carry[0] + 1]


def cutting(replicas=1):
    """Two microbatches, each replica's part of which has `ROWS` examples."""
    return Cutting(2, ROWS * replicas, 0, replicas)


def traced_stage(
    forward=two_layers, *, theta=WEIGHTS, carry=(0,), inputs=(X,), replicas=1, recurrent=False
):
    """The stage `s` with its gradient; inputs are those of a replica for one microbatch."""
    stage = Stage(
        "s",
        forward,
        [*map(tf.convert_to_tensor, theta)],
        [*map(tf.convert_to_tensor, carry)],
        DEVICES[:replicas],
        recurrent=recurrent,
    )
    specs = [tf.TensorSpec(np.shape(x), tf.as_dtype(np.asarray(x).dtype)) for x in inputs]
    traced = TracedStage(stage, specs, cutting(replicas), True, lambda: WholeDraws({}, None))
    traced.differentiate(range(len(traced.output_specs)))
    return traced


def run(fetches, optimizes=True):
    """The values of tensors of the current graph; to the last bit unless it `optimizes`."""
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 4})
    if not optimizes:
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1
    with tf.compat.v1.Session(config=config) as session:
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(fetches)
