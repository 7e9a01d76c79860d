"""Attention in blocks equals attention with all scores at once."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import GradientError
from pipemesh.layers.named.block_attention import Blocks, Buckets, Sight, block_attention
from tests.layers.named.harness import value_of

BUCKETS, BOTH_SIDES = Buckets(6, 9), Buckets(8, 9, both_sides=True)
CAUSAL = Sight()


def plain_attention(
    q, k, v, segments=None, table=None, sight=CAUSAL, cap=None, key_segments=None, buckets=BUCKETS
):
    """All scores at once."""
    length, heads = q.shape[1:3]
    shared, keys = heads // k.shape[2], k.shape[1]
    k, v = tf.repeat(k, shared, axis=2), tf.repeat(v, shared, axis=2)
    scores = tf.einsum("btnd,bsnd->bnts", q, k)
    scores = scores if cap is None else cap * tf.tanh(scores / cap)
    distance = np.arange(length)[:, None] - np.arange(keys)[None, :]
    if table is not None:
        # As the layer of T5 in the package `transformers` has it.
        number = buckets.number // 2 if buckets.both_sides else buckets.number
        away = np.abs(distance) if buckets.both_sides else np.maximum(distance, 0)
        exact = number // 2
        far = np.log(np.maximum(away, exact) / exact) / np.log(buckets.max_distance / exact)
        far = np.minimum(exact + (far * (number - exact)).astype(int), number - 1)
        bucket = np.where(away < exact, away, far)
        bucket = bucket + number * (buckets.both_sides & (distance < 0))
        scores += tf.transpose(tf.gather(table, bucket), [2, 0, 1])[None]
    seen = np.ones([length, keys], bool)
    if sight.causal:
        seen &= distance >= 0
    if sight.window:
        seen &= np.abs(distance) < sight.window
    seen = np.broadcast_to(seen, [q.shape[0], length, keys])
    if segments is not None:
        key_segments = segments if key_segments is None else key_segments
        seen = seen & (segments[:, :, None] == key_segments[:, None, :])
    weights = tf.nn.softmax(tf.where(seen[:, None], scores, -1e9))
    return tf.einsum("bnts,bsnd->btnd", tf.where(seen[:, None], weights, 0.0), v)


def inputs(length, heads=4, kv_heads=2, table=0, keys=None):
    arrays = [value_of("q", [2, length, heads, 3])]
    arrays += [value_of(name, [2, keys or length, kv_heads, 3]) for name in "kv"]
    arrays += [value_of("table", [table, heads])] if table else []
    return [tf.constant(array) for array in arrays]


def differentiated(function, args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        y = function(*args)
        loss = tf.reduce_sum(y * value_of("cotangent", y.shape))
    return [y, *map(tf.convert_to_tensor, tape.gradient(loss, args))]


@pytest.mark.parametrize(
    ("length", "block_size", "kv_heads", "packed", "table", "graph"),
    [
        (8, 8, 4, False, False, True),
        (8, 2, 2, True, True, True),
        (7, 3, 1, True, False, False),
        (11, 4, 4, False, True, True),
        (5, 100, 2, True, True, False),
        (1, 4, 4, False, False, False),
    ],
)
def test_results_and_gradients_are_those_of_all_scores_at_once(
    length, block_size, kv_heads, packed, table, graph
):
    segments = segments_of(length) if packed else None
    args = inputs(length, 4, kv_heads, 6 * table)

    def in_blocks(q, k, v, table=None):
        return block_attention(q, k, v, segments, table, BUCKETS, block_size)

    def run(*args):
        return differentiated(in_blocks, args)

    found = (tf.function(run, autograph=False) if graph else run)(*args)
    wanted = differentiated(
        lambda q, k, v, table=None: plain_attention(q, k, v, segments, table), args
    )
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)


def segments_of(length):
    numbers = np.random.default_rng(length).integers(0, 3, [2, length])
    return tf.constant(np.sort(numbers).astype(np.int32))


@pytest.mark.parametrize(
    ("length", "block_size", "sight", "cap", "packed", "pairs"),
    [
        (8, 2, Sight(window=3), None, False, 7),
        (8, 2, Sight(window=4), 0.5, True, 9),
        (11, 4, Sight(window=1), None, False, 3),
        (7, 7, Sight(window=3), 2.0, True, 1),
        (9, 2, CAUSAL, 0.7, False, 15),
        # In both directions; the last block extends beyond the sequence.
        (11, 4, Sight(causal=False), None, False, 9),
        (11, 4, Sight(causal=False), None, True, 9),
        (9, 2, Sight(causal=False, window=3), 0.7, False, 13),
        (6, 6, Sight(causal=False, window=2), None, True, 1),
        (5, 6, Sight(causal=False), None, False, 1),
    ],
)
def test_sights_and_caps_are_those_of_all_scores_at_once(
    length, block_size, sight, cap, packed, pairs
):
    """Pairs of blocks outside of the sight are left out."""
    segments = segments_of(length) if packed else None
    buckets = BUCKETS if sight.causal else BOTH_SIDES
    args = inputs(length, table=buckets.number * packed)
    blocks = Blocks.of(length, block_size)
    assert len(sight.pairs(blocks, blocks)) == pairs

    def in_blocks(q, k, v, table=None):
        return block_attention(q, k, v, segments, table, buckets, block_size, sight, cap)

    found = differentiated(in_blocks, args)
    wanted = differentiated(
        lambda q, k, v, table=None: plain_attention(
            q, k, v, segments, table, sight, cap, buckets=buckets
        ),
        args,
    )
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("length", "keys", "block_size", "kv_heads", "packed", "graph"),
    [
        (7, 5, 3, 2, (True, True), True),
        (2, 9, 4, 4, (False, False), False),
        (9, 2, 4, 1, (False, True), True),
        (3, 5, 8, 2, (True, True), False),
    ],
)
def test_keys_of_another_sequence(length, keys, block_size, kv_heads, packed, graph):
    """Its length, blocks and segments are its own; without its segment a query has zeros."""
    segments, key_segments = (
        segments_of(number) if there else None
        for number, there in zip((length, keys), packed, strict=True)
    )
    if key_segments is not None:
        key_segments = tf.where(tf.equal(key_segments, 1), 9, key_segments)
    sight = Sight(causal=False)
    args = inputs(length, 4, kv_heads, keys=keys)

    def in_blocks(q, k, v):
        return block_attention(
            q, k, v, segments, None, None, block_size, sight, key_segments=key_segments
        )

    def run(*args):
        return differentiated(in_blocks, args)

    if segments is None and key_segments is not None:
        segments = tf.zeros([2, length], tf.int32)
    found = (tf.function(run, autograph=False) if graph else run)(*args)
    wanted = differentiated(
        lambda q, k, v: plain_attention(q, k, v, segments, sight=sight, key_segments=key_segments),
        args,
    )
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)


def test_very_different_scores_do_not_overflow():
    q, k, v = inputs(9)
    found = differentiated(lambda *args: block_attention(*args, block_size=2), [q * 100, k * 10, v])
    wanted = differentiated(plain_attention, [q * 100, k * 10, v])
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-3, 1e-3)


def test_no_tensor_is_as_large_as_all_scores():
    # The last block extends beyond the sequence.
    length, size = 62, 6

    @tf.function(autograph=False)
    def run(q, k, v):
        return differentiated(lambda *args: block_attention(*args, block_size=size), [q, k, v])

    graph = run.get_concrete_function(*inputs(length)).graph
    graphs = [graph]
    for function in graph._functions.values():
        graphs.append(function.graph if hasattr(function, "graph") else None)
    sizes = [
        output.shape.num_elements() or 0
        for part in graphs
        if part is not None
        for operation in part.get_operations()
        for output in operation.outputs
        if output.dtype.is_floating
    ]
    # Two examples and four heads.
    assert 2 * 4 * size * size in sizes
    assert max(sizes) < 2 * 4 * length * length / 4


def test_bfloat16():
    args = [tf.cast(x, tf.bfloat16) for x in inputs(8)]
    found = differentiated(lambda *a: tf.cast(block_attention(*a, block_size=3), tf.float32), args)
    wanted = differentiated(plain_attention, [tf.cast(x, tf.float32) for x in args])
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        assert mine.dtype == tf.bfloat16
        np.testing.assert_allclose(tf.cast(mine, tf.float32), theirs, 0.1, 0.1)


def test_second_derivatives_are_refused():
    q, k, v = inputs(4)
    with tf.GradientTape() as outer:
        outer.watch(q)
        with tf.GradientTape() as inner:
            inner.watch(q)
            y = tf.reduce_sum(tf.square(block_attention(q, k, v)))
        grad = inner.gradient(y, q)
    with pytest.raises(GradientError, match="first derivatives alone"):
        outer.gradient(grad, q)


def test_of_one_block_nothing_is_corrected():
    @tf.function(autograph=False)
    def run(q, k, v):
        return differentiated(lambda *args: block_attention(*args, block_size=8), [q, k, v])

    kinds = [op.type for op in run.get_concrete_function(*inputs(8)).graph.get_operations()]
    assert kinds.count("Exp") == 2
    assert not {"While", "TensorListFromTensor", "Maximum"} & set(kinds)


def test_blocks_in_a_loop_of_old_control_flow():
    """Its `tf.TensorArray` fails at the second write of a row."""
    arrays = [x.numpy() for x in inputs(7)]
    wanted = differentiated(plain_attention, inputs(7))
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            args = [tf.constant(array) for array in arrays]
            y = block_attention(*args, block_size=3)
            loss = tf.reduce_sum(y * value_of("cotangent", y.shape))
            found = session.run([y, *tf.gradients(loss, args)])
    finally:
        tf.compat.v1.enable_control_flow_v2()
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-5)
