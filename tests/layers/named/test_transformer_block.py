"""A block equals plain TensorFlow; layouts equal one processor (tests/conformance)."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.named import Attention, TransformerBlock
from tests.layers.named.harness import run, value_of
from tests.layers.named.test_block_attention import Sight, plain_attention

pytestmark = pytest.mark.gpu

X = value_of("x", [2, 5, 8])
SEGMENTS = np.array([[0, 0, 1, 1, 1], [3, 3, 3, 3, 5]], np.int32)
PARAMS = TransformerBlock.Params().Set(name="block", input_dim=8, num_heads=4, hidden_dim=12)


MEMORY = value_of("memory", [2, 7, 8])
MEMORY_SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [3, 3, 3, 5, 5, 5, 5]], np.int32)


def plain(w, parallel=False, causal=True, post_norm=False):
    def norm(x, name):
        if f"{name}.scale" not in w:
            return x
        mean, variance = tf.nn.moments(x, [2], keepdims=True)
        x = (x - mean) / tf.sqrt(variance + 1e-6)
        return x * (1 + w[f"{name}.scale"]) + w[f"{name}.bias"]

    def attention(x, name, sight, memory=None, segments=None):
        y = x if post_norm else norm(x, f"{name}_norm")
        q, k, v = (
            tf.einsum("btd,dnh->btnh", z, w[f"{name}.w_{part}"]) + w[f"{name}.b_{part}"]
            for part, z in zip("qkv", (y, *[y if memory is None else memory] * 2), strict=True)
        )
        y = plain_attention(q / np.sqrt(2), k, v, SEGMENTS, sight=sight, key_segments=segments)
        y = tf.einsum("btnh,nhd->btd", y, w[f"{name}.w_out"]) + w[f"{name}.b_out"]
        x = x + norm(y, f"{name}_output_norm")
        return norm(x, f"{name}_norm") if post_norm else x

    x = attention(X, "attention", Sight(causal))
    if not causal:
        x = attention(x, "cross_attention", Sight(False), MEMORY, MEMORY_SEGMENTS)
    y = x if post_norm else norm(X if parallel else x, "feed_forward_norm")
    y = tf.nn.relu(y @ w["feed_forward.w_in"] + w["feed_forward.b_in"])
    y = y @ w["feed_forward.w_out"] + w["feed_forward.b_out"]
    x = x + norm(y, "feed_forward_output_norm")
    return norm(x, "feed_forward_norm") if post_norm else x


@pytest.mark.parametrize(
    ("parallel", "output_norms"), [(False, False), (True, False), (False, True)]
)
def test_results_and_gradients_are_those_of_plain_tensorflow(parallel, output_norms):
    params = PARAMS.Copy().Set(parallel=parallel, output_norms=output_norms)
    found = run(params, [X, SEGMENTS])
    assert ("attention_output_norm.scale" in found.shapes) == output_norms
    found.assert_plain(lambda w: plain(w, parallel))


def test_norms_may_come_behind_the_residuals():
    found = run(PARAMS.Copy().Set(post_norm=True), [X, SEGMENTS])
    found.assert_plain(lambda w: plain(w, post_norm=True))
    with pytest.raises(PipelineError, match=r"parallel is True .* set one of the three alone"):
        run(PARAMS.Copy().Set(post_norm=True, parallel=True), [X])


def test_a_block_may_see_both_sides_and_a_memory():
    params = PARAMS.Copy().Set(cross_attention_tpl=Attention.Params(), output_norms=True)
    params.attention_tpl.causal = False
    inputs = [X, SEGMENTS, None, None, MEMORY, MEMORY_SEGMENTS]
    run(params, inputs).assert_plain(lambda w: plain(w, causal=False))


def test_a_memory_that_no_part_sees_is_an_error():
    with pytest.raises(PipelineError, match="has cross=False"):
        run(PARAMS, [X, None, None, None, MEMORY])
