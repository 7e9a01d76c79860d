"""A block equals plain TensorFlow under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.layers.named import TransformerBlock
from tests.layers.named.harness import run, value_of
from tests.layers.named.test_block_attention import plain_attention

X = value_of("x", [2, 5, 8])
SEGMENTS = np.array([[0, 0, 1, 1, 1], [3, 3, 3, 3, 5]], np.int32)
PARAMS = TransformerBlock.Params().Set(name="block", input_dim=8, num_heads=4, hidden_dim=12)


def plain(w, parallel=False):
    def norm(x, name):
        if f"{name}.scale" not in w:
            return x
        mean, variance = tf.nn.moments(x, [2], keepdims=True)
        x = (x - mean) / tf.sqrt(variance + 1e-6)
        return x * (1 + w[f"{name}.scale"]) + w[f"{name}.bias"]

    y = norm(X, "attention_norm")
    q, k, v = (
        tf.einsum("btd,dnh->btnh", y, w[f"attention.w_{name}"]) + w[f"attention.b_{name}"]
        for name in "qkv"
    )
    y = plain_attention(q / np.sqrt(2), k, v, SEGMENTS)
    y = tf.einsum("btnh,nhd->btd", y, w["attention.w_out"]) + w["attention.b_out"]
    x = X + norm(y, "attention_output_norm")
    y = norm(X if parallel else x, "feed_forward_norm")
    y = tf.nn.relu(y @ w["feed_forward.w_in"] + w["feed_forward.b_in"])
    y = y @ w["feed_forward.w_out"] + w["feed_forward.b_out"]
    return x + norm(y, "feed_forward_output_norm")


@pytest.mark.parametrize(
    ("parallel", "output_norms"), [(False, False), (True, False), (False, True)]
)
def test_results_and_gradients_are_those_of_plain_tensorflow(parallel, output_norms):
    params = PARAMS.Copy().Set(parallel=parallel, output_norms=output_norms)
    found = run(params, [X, SEGMENTS], "data:2;model:2")
    assert ("attention_output_norm.scale" in found.shapes) == output_norms
    found.assert_plain(lambda w: plain(w, parallel))
