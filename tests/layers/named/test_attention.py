"""Attention equals plain TensorFlow under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.layers.named import Attention
from tests.layers.named.harness import RULES, run, value_of
from tests.layers.named.test_block_attention import plain_attention

X = value_of("x", [2, 6, 8])
SEGMENTS = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 5, 5]], np.int32)
POSITIONS = np.array([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]], np.int32)
PADDINGS = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]], np.float32)
PARAMS = Attention.Params().Set(
    name="attention", input_dim=8, num_heads=4, dim_per_head=2, block_size=4
)
# Buckets by distance: as `plain_attention` has them.
BUCKETS = {"relative_buckets": 6, "relative_max_distance": 9}


def plain(w, segments=None, positions=None):
    """Rotates if there are positions."""

    def turned(x):
        if positions is None:
            return x
        # As complex numbers.
        angles = positions[..., None, None] * 1e4 ** -np.arange(1.0)
        pair = tf.complex(x[..., :1], x[..., 1:]) * np.exp(1j * angles).astype(np.complex64)
        return tf.concat([tf.math.real(pair), tf.math.imag(pair)], -1)

    q, k, v = (
        tf.einsum("btd,dnh->btnh", X, w[f"w_{name}"]) + w.get(f"b_{name}", 0.0) for name in "qkv"
    )
    y = plain_attention(turned(q) / np.sqrt(2), turned(k), v, segments, w.get("relative_bias"))
    return tf.einsum("btnh,nhd->btd", y, w["w_out"]) + w.get("b_out", 0.0)


# Other layouts equal one processor (tests/conformance).
@pytest.mark.parametrize(
    ("mesh", "rules", "changes", "segments", "positions"),
    [
        pytest.param("model:4", RULES, {}, SEGMENTS, None, id="plain"),
        pytest.param(
            "data:2;model:2",
            RULES,
            {"num_kv_heads": 2, "use_rotary": True, "use_bias": False, **BUCKETS},
            SEGMENTS,
            POSITIONS,
            id="groups of heads, rotations, biases by distance",
        ),
        pytest.param(
            "model:4", "heads:model", {"num_kv_heads": 2}, None, None, id="keys on two processors"
        ),
        pytest.param("model:1", RULES, {"use_rotary": True}, None, None, id="defaults"),
    ],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(
    mesh, rules, changes, segments, positions
):
    found = run(PARAMS.Copy().Set(**changes), [X, segments, positions], mesh, rules)
    if changes.get("use_rotary") and positions is None:
        positions = np.broadcast_to(np.arange(6), [2, 6])
    found.assert_plain(lambda w: plain(w, segments, positions))
    heads = changes.get("num_kv_heads", 4)
    assert tuple(found.shapes["w_k"]) == (8, heads, 2)
    if "relative_buckets" in changes:
        assert tuple(found.shapes["relative_bias"]) == (changes["relative_buckets"], 4)


@pytest.mark.parametrize("segments", [SEGMENTS, None])
def test_nobody_sees_padding(segments):
    def call(layer, theta, x, segments, padded):
        y = layer.FProp(theta, x, segments, paddings=padded)
        return y * layer.Named(1 - padded, "batch;length")

    found = run(PARAMS, [X, segments, PADDINGS], "data:2", call=call)
    ids = np.where(PADDINGS > 0, 99, 0 if segments is None else segments)
    found.assert_plain(lambda w: plain(w, ids) * (1 - PADDINGS)[..., None])
