"""Attention equals plain TensorFlow.

Layouts equal one processor (tests/conformance), but for more processors than keys.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.named import Attention, Norm, lowering_scope
from pipemesh.layers.named.split_attention import Ring, ring_attention
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.named.harness import SCALE, run, value_of
from tests.layers.named.test_block_attention import (
    BOTH_SIDES,
    BUCKETS,
    CAUSAL,
    Sight,
    plain_attention,
)

pytestmark = pytest.mark.gpu

X = value_of("x", [2, 6, 8])
SEGMENTS = np.array([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 5, 5]], np.int32)
POSITIONS = np.array([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]], np.int32)
PADDINGS = np.array([[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]], np.float32)
PARAMS = Attention.Params().Set(
    name="attention", input_dim=8, num_heads=4, dim_per_head=2, block_size=4
)

RELATIVE = {"relative_buckets": BUCKETS.number, "relative_max_distance": BUCKETS.max_distance}


def plain(
    w,
    segments=None,
    positions=None,
    score_cap=None,
    score_scale=0.5**0.5,
    sight=CAUSAL,
    x=X,
    memory=None,
    memory_segments=None,
):
    """Rotates the first two elements of a head if there are positions, after norms if any."""

    def turned(x):
        if positions is None:
            return x
        # As complex numbers.
        angles = positions[..., None, None] * 1e4 ** -np.arange(1.0)
        pair = tf.complex(x[..., :1], x[..., 1:2]) * np.exp(1j * angles).astype(np.complex64)
        return tf.concat([tf.math.real(pair), tf.math.imag(pair), x[..., 2:]], -1)

    def normed(x, name):
        if f"{name}_norm.scale" not in w:
            return x
        root = tf.sqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6)
        return x / root * (1 + w[f"{name}_norm.scale"])

    memory = x if memory is None else memory
    q, k, v = (
        tf.einsum("btd,dnh->btnh", x, w[f"w_{name}"]) + w.get(f"b_{name}", 0.0)
        for name, x in zip("qkv", (x, memory, memory), strict=True)
    )
    q, k = turned(normed(q, "q")) * score_scale, turned(normed(k, "k"))
    buckets = BUCKETS if sight.causal else BOTH_SIDES
    y = plain_attention(
        q, k, v, segments, w.get("relative_bias"), sight, score_cap, memory_segments, buckets
    )
    return tf.einsum("btnh,nhd->btd", y, w["w_out"]) + w.get("b_out", 0.0)


GROUPS = {"num_kv_heads": 2, "use_rotary": True, "use_bias": False, **RELATIVE}


@pytest.mark.parametrize(
    ("changes", "segments", "positions"),
    [
        pytest.param({}, SEGMENTS, None, id="plain"),
        pytest.param(GROUPS, SEGMENTS, POSITIONS, id="groups"),
        pytest.param({"use_rotary": True}, None, None, id="defaults"),
    ],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(changes, segments, positions):
    found = run(PARAMS.Copy().Set(**changes), [X, segments, positions])
    if changes.get("use_rotary") and positions is None:
        positions = np.broadcast_to(np.arange(6), [2, 6])
    found.assert_plain(lambda w: plain(w, segments, positions))
    heads = changes.get("num_kv_heads", 4)
    assert tuple(found.shapes["w_k"]) == (8, heads, 2)
    if "relative_buckets" in changes:
        assert tuple(found.shapes["relative_bias"]) == (changes["relative_buckets"], 4)


BOTH = {"relative_buckets": BOTH_SIDES.number, "relative_max_distance": BOTH_SIDES.max_distance}
NORMED = {"norm_tpl": Norm.Params().Set(kind="rms")}
LIMITS = {"window": 3, "score_cap": 0.4, "score_scale": 0.9}


def test_limits_and_norms_are_those_of_plain_tensorflow():
    changes = {"num_kv_heads": 2, "dim_per_head": 4, "use_rotary": True, "rotary_dim": 2}
    changes |= {"use_out_bias": False, "norm_tpl": Norm.Params().Set(kind="rms"), **LIMITS}
    found = run(PARAMS.Copy().Set(**changes), [X, SEGMENTS, POSITIONS])
    assert "b_out" not in found.shapes and "b_q" in found.shapes
    limits = LIMITS | {"sight": Sight(window=LIMITS["window"])}
    del limits["window"]
    found.assert_plain(lambda w: plain(w, SEGMENTS, POSITIONS, **limits))


@pytest.mark.parametrize(
    ("mesh", "changes", "segments"),
    [
        ("model:1", {"num_kv_heads": 2, "window": 3, **BOTH}, SEGMENTS),
        # Two processors have heads of the same key.
        ("model:4", {"num_kv_heads": 2, "window": 2, "use_rotary": True}, None),
    ],
)
def test_tokens_may_see_both_sides(mesh, changes, segments):
    found = run(PARAMS.Copy().Set(causal=False, **changes), [X, segments], mesh, "heads:model")
    positions = np.broadcast_to(np.arange(6), [2, 6]) if changes.get("use_rotary") else None
    sight = Sight(False, changes.get("window"))
    found.assert_plain(lambda w: plain(w, segments, positions, sight=sight))


# A value that `assert_plain` gives to the path of an input.
MEMORY = SCALE * value_of("input 4", [2, 9, 8])
MEMORY_SEGMENTS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 7], [5, 3, 3, 3, 3, 7, 7, 7, 7]], np.int32)
MEMORY_PADDINGS = np.array([[0] * 7 + [1] * 2, [0] * 4 + [1] * 5], np.float32)
CROSS = PARAMS.Copy().Set(causal=False, cross=True)


@pytest.mark.parametrize(
    ("mesh", "changes", "segments", "memory_segments", "paddings"),
    [
        ("model:1", {"use_bias": False}, SEGMENTS, MEMORY_SEGMENTS, None),
        # Two processors have heads of the same key.
        ("model:4", {"num_kv_heads": 2}, None, None, MEMORY_PADDINGS),
        ("model:1", NORMED, SEGMENTS, MEMORY_SEGMENTS, MEMORY_PADDINGS),
    ],
)
def test_tokens_may_see_another_sequence(mesh, changes, segments, memory_segments, paddings):
    inputs = [X, segments, None, PADDINGS, MEMORY, memory_segments, paddings]
    params = CROSS.Copy().Set(**changes)
    found = run(params, inputs, mesh, "heads:model", of_inputs=True)
    if paddings is not None:
        segments = np.zeros([2, 6], np.int32) if segments is None else segments
        ids = 0 if memory_segments is None else memory_segments
        memory_segments = np.where(paddings > 0, 99, ids)

    def of(w):
        return plain(
            w, segments, sight=Sight(False), memory=w["input 4"], memory_segments=memory_segments
        )

    found.grads.pop("input 0")
    found.shapes["input 4"] = MEMORY.shape
    found.assert_plain(of)


LONGER = value_of("longer", [2, 8, 8])
LONGER_SEGMENTS = np.array([[0, 0, 1, 1, 1, 1, 2, 2], [3, 3, 3, 3, 5, 5, 5, 5]], np.int32)
RING = {"split_length_by": "ring"}


@pytest.mark.parametrize(
    ("mesh", "rules", "changes", "segments"),
    [
        pytest.param("cp:4", "length:cp", RELATIVE, LONGER_SEGMENTS, id="for heads"),
        pytest.param("cp:4", "length:cp", {**RING, "block_size": 1}, LONGER_SEGMENTS, id="zigzag"),
        pytest.param("cp:4", "length:cp", {**RING, "window": 3}, None, id="of two steps"),
        pytest.param(
            "cp:2;model:2",
            "length:cp;heads:model",
            {**RING, **RELATIVE, "num_kv_heads": 2, "use_rotary": True, "block_size": 3},
            LONGER_SEGMENTS,
            id="some of all keys, blocks that end behind the sequence",
        ),
    ],
)
def test_no_processor_needs_a_whole_sequence(mesh, rules, changes, segments):
    params = PARAMS.Copy().Set(**changes)
    found = run(params, [LONGER, segments], mesh, rules, of_inputs=True)
    given = [None if x is None else list(x.shape) for x in (LONGER, segments)]
    with lowering_scope(found.lowering):
        assert params.cls.FPropMeta(params, *given).communication.rows == found.lowering.costs.rows
    positions = np.broadcast_to(np.arange(8), [2, 8]) if changes.get("use_rotary") else None
    sight = Sight(window=changes.get("window"))
    found.grads.pop("input 0")
    found.assert_plain(lambda w: plain(w, segments, positions, sight=sight, x=LONGER))


def test_ring_holds_scores_of_one_step():
    """Once TensorFlow began all steps at once, since their keys do not depend on each other."""
    members, tokens, heads = 4, 256, 4
    mesh = Mesh.from_text(f"cp:{members}")
    lowering = PlacementLowering(mesh, LayoutRules(), [f"CPU:{i}" for i in range(members)])
    ring = Ring(members, tokens, tokens, Sight(), False, block_size=tokens // 2)
    with tf.Graph().as_default():
        x = lowering.raw_map(
            lambda at: tf.random.uniform([1, tokens, heads, 4]), lowering.coordinate("cp")
        )
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = ring_attention(lowering, "cp", ring, [x, x, x])
        config = tf.compat.v1.ConfigProto(device_count={"CPU": members})
        options, metadata = tf.compat.v1.RunOptions(trace_level=3), tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session(config=config) as session:
            session.run(tape.gradient(found, x), options=options, run_metadata=metadata)
    # Scores and their gradients, of two halves that meet two others.
    scores = 4 * 2 * heads * (tokens // 2) ** 2
    for device in metadata.step_stats.dev_stats:
        records = [
            (record.alloc_micros, record.alloc_bytes)
            for node in device.node_stats
            for memory in node.memory
            for record in memory.allocation_records
        ]
        held = itertools.accumulate(size for _, size in sorted(records))
        assert scores < max(held) < 3.5 * scores, device.device


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"score_cap": -1.0}, "score_cap is -1.0"),
        ({"rotary_dim": 2}, "rotary_dim is 2, use_rotary False"),
        ({"rotary_dim": 4, "use_rotary": True}, "a head has 2 elements"),
        ({"causal": False, "relative_buckets": 7}, "give an even number, 4 or more"),
        (
            {"split_length_by": "rings"},
            "split_length_by is 'rings'; it may be 'heads', 'ring' or None",
        ),
        ({"cross": True}, "causal is True.*; set causal=False"),
        ({"cross": True, "causal": False, "window": 2}, "window 2"),
    ],
)
def test_limits_are_checked(changes, message):
    with pytest.raises(PipelineError, match=message):
        PARAMS.Copy().Set(**changes).Instantiate()


def test_nobody_sees_padding():
    def call(layer, theta, x, segments, padded):
        y = layer.FProp(theta, x, segments, paddings=padded)
        return y * layer.Named(1 - padded, "batch;length")

    found = run(PARAMS, [X, SEGMENTS, PADDINGS], call=call)
    ids = np.where(PADDINGS > 0, 99, SEGMENTS)
    found.assert_plain(lambda w: plain(w, ids) * (1 - PADDINGS)[..., None])


@pytest.mark.parametrize(
    ("params", "inputs", "message"),
    [
        (CROSS, [X], "sees a memory .*, but was given none"),
        (PARAMS, [X, None, None, None, MEMORY], "has cross=False"),
        (CROSS, [X, None, None, None, None, None, MEMORY_PADDINGS], "but was given none; give one"),
        (CROSS, [X, SEGMENTS, None, None, MEMORY], "tokens were given segments, the memory none"),
    ],
)
def test_a_memory_is_given_to_those_who_see_it(params, inputs, message):
    with pytest.raises(PipelineError, match=message):
        run(params, inputs)
