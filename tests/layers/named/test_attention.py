"""Attention equals plain TensorFlow under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import Attention, lowering_scope
from tests.layers.named.harness import make_lowering, reference, run, value_of
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


def plain(p, segments=None, positions=None):
    kv = p.num_kv_heads or p.num_heads
    shapes = {"w_q": [8, 4, 2], "w_k": [8, kv, 2], "w_v": [8, kv, 2], "w_out": [4, 2, 8]}
    if p.use_bias:
        shapes |= {"b_q": [4, 2], "b_k": [kv, 2], "b_v": [kv, 2], "b_out": [8]}
    if p.relative_buckets:
        shapes["relative_bias"] = [6, 4]

    def turned(x):
        # As complex numbers.
        angles = positions[..., None, None] * 1e4 ** -np.arange(1.0)
        pair = tf.complex(x[..., :1], x[..., 1:]) * np.exp(1j * angles).astype(np.complex64)
        return tf.concat([tf.math.real(pair), tf.math.imag(pair)], -1)

    def attention(w):
        q, k, v = (
            tf.einsum("btd,dnh->btnh", X, w[f"w_{name}"]) + w.get(f"b_{name}", 0.0)
            for name in "qkv"
        )
        if p.use_rotary:
            q, k = turned(q), turned(k)
        y = plain_attention(q / np.sqrt(2), k, v, segments, w.get("relative_bias"))
        return tf.einsum("btnh,nhd->btd", y, w["w_out"]) + w.get("b_out", 0.0)

    return reference(attention, shapes)


# Other layouts equal one processor (tests/conformance).
def test_results_and_gradients_are_those_of_plain_tensorflow():
    found = run(PARAMS, [X, SEGMENTS], "model:4")
    found.assert_close(*plain(PARAMS, SEGMENTS))
    assert found.lowering.costs.rows[("model",), "all_reduce", "forward"][0] == 1


def test_groups_of_heads_with_rotations_and_biases_by_distance():
    params = PARAMS.Copy().Set(num_kv_heads=2, use_rotary=True, use_bias=False, **BUCKETS)
    found = run(params, [X, SEGMENTS, POSITIONS], "data:2;model:2")
    found.assert_close(*plain(params, SEGMENTS, POSITIONS))


def test_keys_may_stay_whole_where_heads_are_split():
    """Two processors have heads of the same key."""
    params = PARAMS.Copy().Set(num_kv_heads=2)
    run(params, [X], "model:4", "heads:model").assert_close(*plain(params))


def test_by_default_a_row_is_one_segment_and_positions_are_places():
    params = PARAMS.Copy().Set(use_rotary=True)
    places = np.broadcast_to(np.arange(6), [2, 6])
    run(params, [X]).assert_close(*plain(params, None, places))


@pytest.mark.parametrize("segments", [SEGMENTS, None])
def test_nobody_sees_padding(segments):
    def call(layer, theta, x, *segments):
        padded = tf.constant(PADDINGS)
        y = layer.FProp(theta, x, *(segments or [None]), paddings=padded)
        return y * layer.Named(1 - padded, "batch;length")

    found = run(PARAMS, [X, *([] if segments is None else [segments])], "data:2", call=call)
    ids = np.where(PADDINGS > 0, 99, 0 if segments is None else segments)
    wanted, _ = plain(PARAMS, ids)
    found.assert_close([wanted[0] * (1 - PADDINGS)[..., None]], found.grads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3, "dim_per_head": None}, "input_dim 8 is no multiple of num_heads 3"),
        ({"num_kv_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ({"use_rotary": True, "dim_per_head": 3}, "heads have 3; make dim_per_head even"),
        ({"relative_buckets": 1}, "relative_buckets is 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"use_bias": "no"}, "use_bias is 'no'"),
        ({"rotary_base": 0}, "rotary_base is 0; it must be a number above 0"),
    ],
)
def test_params_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(PipelineError, match=message):
        PARAMS.Copy().Set(**changes).Instantiate()


@pytest.mark.parametrize(
    ("mesh", "rules", "changes", "message"),
    [
        ("model:4", "heads:model", {"num_heads": 6}, "'heads' of .* size 6, which .* into 4"),
        ("model:2", "length:model", {}, "rule 'length:model' splits dim 'length'"),
        ("model:2", "kv_heads:model", {"num_kv_heads": 2}, "'heads' has no rule; .* lie with"),
        (
            "a:2;b:2",
            "heads:a;kv_heads:b",
            {"num_kv_heads": 2},
            "'heads' is split over 'a'; .* write 'heads:b;kv_heads:b'",
        ),
        (
            "model:2",
            "heads:model",
            {"num_heads": 6, "num_kv_heads": 3},
            "leaves a processor 3 heads, of which 2 share a key",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_errors_before_anything_runs(mesh, rules, changes, message):
    with lowering_scope(make_lowering(mesh, rules)), pytest.raises(LayoutError, match=message):
        PARAMS.Copy().Set(**changes).Instantiate()
