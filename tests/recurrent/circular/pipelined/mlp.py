"""A small stack of feed-forward layers, quick to build.

It has dropout, a split dim, a weight that all layers share, and a norm without epsilon, which is
NaN for zeros, as they are in bubbles.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.recurrent.circular.layer_position import layer_seed
from tests.recurrent.circular.pipelined.model import Model

RATE = 0.25
_draw = np.random.default_rng(2)
INPUTS = {
    "x": (_draw.standard_normal((16, 3)).astype(np.float32), "batch:16;io:3"),
    "target": (_draw.standard_normal((16, 4)).astype(np.float32), "batch:16;d_model:4"),
}


def plain(step, inputs, params):
    x = inputs["x"] @ params["first"]
    for layer in range(params["wi"].shape[0]):
        scale, wi, wo = (params[name][layer] for name in ("scale", "wi", "wo"))
        normed = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True)) * scale
        hidden = tf.tanh(normed @ wi * params["gain"])
        seed = layer_seed(tf.stack([step, 1]), layer)
        hidden = tf.nn.experimental.stateless_dropout(hidden, RATE, seed=seed, rng_alg="philox")
        x += hidden @ wo
    return tf.reduce_mean(tf.square(x - inputs["target"])), x


def meshed(pipeline, step, inputs, params):
    def layer(x, w, position):
        normed = x * ops.rsqrt(ops.reduce_mean(x * x, "d_model")) * w["scale"]
        hidden = ops.tanh(ops.einsum([normed, w["wi"]], ["batch", "d_ff"]) * w["gain"])
        hidden = position.dropout(hidden, rate=RATE, seed=tf.stack([step, 1]))
        return x + ops.einsum([hidden, w["wo"]], ["batch", "d_model"])

    x = ops.einsum([inputs["x"], params["first"]], ["batch", "d_model"])
    y = pipeline(layer, x, MLP.in_layers(params))
    return ops.reduce_mean(ops.square(y - inputs["target"])), y


MLP = Model(
    name="mlp",
    layers=4,
    own={"scale": "d_model:4", "wi": "d_model:4;d_ff:6", "wo": "d_ff:6;d_model:4"},
    shared={"gain": "d_ff:6"},
    outside={"first": "io:3;d_model:4"},
    inputs=INPUTS,
    output="batch:16;d_model:4",
    plain=plain,
    meshed=meshed,
    ones=("scale", "gain"),
)
# For as many stages as four cores have with two virtual stages.
DEEP_MLP = dataclasses.replace(MLP, name="deep_mlp", layers=8)
