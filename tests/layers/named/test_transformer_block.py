"""A block equals plain TensorFlow under every layout, with dropout on."""

import numpy as np
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.layers import FeatureExtractionLayer
from pipemesh.layers.named import TransformerBlock, lowering_scope
from tests.layers.named.harness import make_lowering, reference, run, value_of
from tests.layers.named.test_block_attention import plain_attention

X = value_of("x", [2, 5, 8])
SEGMENTS = np.array([[0, 0, 1, 1, 1], [3, 3, 3, 3, 5]], np.int32)
PARAMS = TransformerBlock.Params().Set(name="block", input_dim=8, num_heads=4, hidden_dim=12)
SHAPES = {
    "attention_norm.scale": [8],
    "attention_norm.bias": [8],
    **{f"attention.w_{name}": [8, 4, 2] for name in "qkv"},
    **{f"attention.b_{name}": [4, 2] for name in "qkv"},
    "attention.w_out": [4, 2, 8],
    "attention.b_out": [8],
    "feed_forward_norm.scale": [8],
    "feed_forward_norm.bias": [8],
    "feed_forward.w_in": [8, 12],
    "feed_forward.b_in": [12],
    "feed_forward.w_out": [12, 8],
    "feed_forward.b_out": [8],
}


def plain(w):
    def norm(x, name):
        mean, variance = tf.nn.moments(x, [2], keepdims=True)
        x = (x - mean) / tf.sqrt(variance + 1e-6)
        return x * (1 + w[f"{name}.scale"]) + w[f"{name}.bias"]

    y = norm(X, "attention_norm")
    q, k, v = (
        tf.einsum("btd,dnh->btnh", y, w[f"attention.w_{name}"]) + w[f"attention.b_{name}"]
        for name in "qkv"
    )
    y = plain_attention(q / np.sqrt(2), k, v, SEGMENTS)
    x = X + tf.einsum("btnh,nhd->btd", y, w["attention.w_out"]) + w["attention.b_out"]
    y = norm(x, "feed_forward_norm") @ w["feed_forward.w_in"] + w["feed_forward.b_in"]
    return x + tf.nn.relu(y) @ w["feed_forward.w_out"] + w["feed_forward.b_out"]


def test_results_and_gradients_are_those_of_plain_tensorflow():
    run(PARAMS, [X, SEGMENTS], "data:2;model:2").assert_close(*reference(plain, SHAPES))


def test_results_are_dropped_in_a_stack_too():
    stage = FeatureExtractionLayer.Params().Set(name="stage", sub=[PARAMS.Copy()])
    plain = run(stage, [X], loss=None).outputs[0]
    stage.sub[0].dropout_rate = 0.3
    assert abs(run(stage, [X], loss=None).outputs[0] - plain).max() > 0.1


def test_templates_reach_the_parts():
    params = PARAMS.Copy()
    params.norm_tpl.kind = "rms"
    params.attention_tpl.num_kv_heads = 2
    params.feed_forward_tpl.activation = "SWIGLU"
    found = run(params, [X], "model:2")
    assert "feed_forward_norm.bias" not in found.grads
    assert found.grads["attention.w_k"].shape == (8, 2, 2)
    assert "feed_forward.w_gate" in found.grads


def test_there_are_two_all_reduces_forward_and_two_backward():
    # Queries, keys and values, and both products of a gate, send one gradient together.
    params = PARAMS.Copy()
    params.feed_forward_tpl.activation = "SWIGLU"

    def call(layer, theta, x):
        # Makes the gradient of the block's input wanted.
        return layer.FProp(theta, layer.Named(x, "batch;length;embed") * theta.attention.b_out[0])

    costs = run(params, [X], "model:2", call=call).lowering.costs
    assert [costs.rows[("model",), "all_reduce", way][0] for way in ("forward", "backward")] == [
        2,
        2,
    ]
    size = X.nbytes
    assert costs.total_bytes == 4 * size
    with lowering_scope(make_lowering("model:2")):
        meta = TransformerBlock.FPropMeta(params, tshape.Shape(X.shape))
    assert meta.communication_bytes == 2 * 4 * size
