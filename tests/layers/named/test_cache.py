"""Tokens one after the other have what all at once have, under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import operations_within
from pipemesh.backend.operations import copied, overwritten
from pipemesh.errors import DecodingError, PipelineError
from pipemesh.layers.named import Attention, KeyValueCache, Norm, cache_scope, current_cache
from pipemesh.layers.named.cache import SlottedCache
from pipemesh.lowering import ops
from pipemesh.recurrent.circular.tick_loop import put
from pipemesh.recurrent.watch.placement import check_devices
from tests.layers.named.harness import RULES, run, value_of

BATCH, LENGTH = 2, 7
X = value_of("x", [BATCH, LENGTH, 8])
PARAMS = Attention.Params().Set(
    name="attention", input_dim=8, num_heads=4, dim_per_head=2, block_size=4
)
KINDS = {
    "groups": {"num_kv_heads": 2, "use_rotary": True},
    "all": {"num_kv_heads": 2, "use_rotary": True, "relative_buckets": 4},
    "limited": {
        "num_kv_heads": 2,
        "dim_per_head": 4,
        "use_rotary": True,
        "rotary_dim": 2,
        "window": 3,
        "score_cap": 0.5,
        "norm_tpl": Norm.Params().Set(kind="rms"),
    },
}


def by_parts(*lengths):
    """Calls a layer with some tokens after the other."""

    def call(layer, theta, x):
        kept, found, begin = {}, [], 0
        for length in lengths:
            places = tf.tile([tf.range(begin, begin + length)], [BATCH, 1])
            with cache_scope(KeyValueCache(LENGTH + 2, places, kept)) as cache:
                y = layer.FProp(theta, x[:, begin : begin + length])
            kept, begin = cache.kept, begin + length
            found.append(ops.export_tensor(y))
        assert begin == LENGTH and current_cache() is None
        return tf.concat(found, 1)

    return call


@pytest.mark.parametrize(
    ("mesh", "rules", "kind", "parts"),
    [
        ("data:2;model:2", RULES, "all", (1, 4, 2)),
        ("model:1", RULES, "limited", (2, 4, 1)),
        # Two processors have heads of the same key.
        ("model:4", "heads:model", "groups", (4, 3)),
    ],
)
def test_attention_goes_on_where_it_was(mesh, rules, kind, parts):
    params = PARAMS.Copy().Set(**KINDS[kind])
    wanted = run(params, [X], loss=None).outputs
    found = run(params, [X], mesh, rules, call=by_parts(*parts), loss=None).outputs
    np.testing.assert_allclose(found[0], wanted[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("mesh", "rules", "changes", "segments"),
    [
        ("model:1", RULES, {}, True),
        # Two processors have heads of the same key.
        ("model:4", "heads:model", {"num_kv_heads": 2}, False),
    ],
)
def test_a_memory_is_projected_once(mesh, rules, changes, segments):
    params = PARAMS.Copy().Set(causal=False, cross=True, block_size=2, **changes)
    memory = value_of("memory", [BATCH, 5, 8])
    ids = np.repeat([[1, 1, 1, 2, 2, 1, 1]], BATCH, 0).astype(np.int32) if segments else None
    # The first row has nothing that its second segment sees.
    of_memory = np.array([[1, 1, 1, 2, 0], [2, 1, 1, 1, 0]], np.int32) if segments else None
    paddings = np.array([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]], np.float32)

    def call(layer, theta, x, ids, memory, of_memory, paddings):
        given, kept, found = (memory, of_memory, paddings), {}, []
        for begin, end in [(0, 3), (3, 4), (4, 7)]:
            cache = KeyValueCache(LENGTH, tf.tile([tf.range(begin, end)], [BATCH, 1]), kept)
            own = None if ids is None else ids[:, begin:end]
            with cache_scope(cache):
                y = layer.FProp(theta, x[:, begin:end], own, None, None, *given)
            # Later calls have no memory.
            given, kept = (), cache.kept
            found.append(ops.export_tensor(y))
        return tf.concat(found, 1)

    def at_once(layer, theta, x, ids, *of_memory):
        return layer.FProp(theta, x, ids, None, None, *of_memory)

    inputs = [X, ids, memory, of_memory, paddings]
    wanted = run(params, inputs, call=at_once, loss=None).outputs
    found = run(params, inputs, mesh, rules, call=call, loss=None).outputs
    np.testing.assert_allclose(found[0], wanted[0], rtol=2e-5, atol=2e-6)


def test_a_cache_without_a_memory_is_an_error():
    def call(layer, theta, x):
        with cache_scope(KeyValueCache(LENGTH, tf.tile([tf.range(LENGTH)], [BATCH, 1]))):
            return layer.FProp(theta, x)

    with pytest.raises(PipelineError, match="the cache has none; give it to the first call"):
        run(PARAMS.Copy().Set(causal=False, cross=True), [X], call=call, loss=None)


def test_a_memory_in_one_loop_of_stages_is_an_error():
    with pytest.raises(DecodingError, match=r"cross_attention sees .*='placement'"):
        SlottedCache(4, None, {}, (), ()).remember("block.cross_attention", ())


ONES = np.ones([BATCH, LENGTH], np.int32)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"segment_ids": ONES, "memory_segment_ids": ONES}, {}),
        ({"memory_paddings": np.zeros_like(X[..., 0])}, {"segment_ids": ONES}),
        ({}, {"segment_ids": ONES}),
    ],
)
def test_all_calls_of_rows_have_segments_or_none(first, later):
    def call(layer, theta, x):
        kept = None
        for given in ({"memory": X, **first}, later):
            with cache_scope(KeyValueCache(LENGTH, tf.zeros_like(ONES), kept)) as cache:
                y = layer.FProp(theta, x, **{k: tf.constant(v) for k, v in given.items()})
            kept = cache.kept
        return y

    with pytest.raises(PipelineError, match="give segment_ids to all calls or to none"):
        run(PARAMS.Copy().Set(causal=False, cross=True), [X], call=call, loss=None)


@pytest.mark.parametrize("places", [[[0, 1], [3, 4]], [[0, -1], [2, 3]]])
def test_positions_outside_the_cache_are_an_error(places):
    with pytest.raises(DecodingError, match="length=4 allows 0 to 3"):
        KeyValueCache(4, tf.constant(places))


def test_tokens_that_see_both_sides_continue_nothing():
    def call(layer, theta, x):
        places = tf.tile([tf.range(LENGTH)], [BATCH, 1])
        with cache_scope(KeyValueCache(LENGTH, places)) as cache:
            y = layer.FProp(theta, x)
        assert not cache.kept
        with (
            cache_scope(KeyValueCache(LENGTH, places, cache.kept)),
            pytest.raises(PipelineError, match=r"causal=False .* cannot be continued"),
        ):
            layer.FProp(theta, x)
        return y

    params = PARAMS.Copy().Set(causal=False)
    found, wanted = (run(params, [X], call=how, loss=None).outputs[0] for how in (call, None))
    np.testing.assert_array_equal(found, wanted)


def test_rows_may_stand_at_different_places():
    """What was written behind a row's end does no harm."""
    lengths = [3, 5]

    def call(layer, theta, x):
        places = tf.tile([tf.range(5)], [BATCH, 1])
        with cache_scope(KeyValueCache(LENGTH, places)) as cache:
            # Both rows with five tokens, of which the first row has two too many.
            layer.FProp(
                theta,
                tf.where(places[..., None] < tf.constant(lengths)[:, None, None], x[:, :5], 9.0),
            )
        found = []
        for at in (tf.constant(lengths), tf.constant(lengths) + 1):
            here = tf.gather(x, at, batch_dims=1, axis=1)[:, None]
            with cache_scope(KeyValueCache(LENGTH, at[:, None], cache.kept)) as cache:
                found.append(ops.export_tensor(layer.FProp(theta, here)))
        return tf.concat(found, 1)

    whole = run(PARAMS, [X], "model:1", loss=None).outputs[0]
    found = run(PARAMS, [X], "data:2", call=call, loss=None).outputs[0]
    wanted = [[whole[row, at + i] for i in range(2)] for row, at in enumerate(lengths)]
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


def test_what_is_remembered_lies_with_its_heads():
    def call(layer, theta, x):
        with cache_scope(KeyValueCache(9, tf.tile([tf.range(LENGTH)], [BATCH, 1]))) as cache:
            y = layer.FProp(theta, x)
        ((keys, values),) = cache.kept.values()
        assert [s.shape.as_list() for s in (*keys, *values)] == [[1, 2, 9, 2]] * 8
        return y

    run(PARAMS, [X], "data:2;model:2", call=call, loss=None)


def over(buffer, at, row):
    return overwritten(copied(buffer), at[None], row[None])


CACHED = [tf.bfloat16, tf.float16, tf.float32]


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        *((put, dtype) for dtype in (tf.bool, tf.int32, *CACHED)),
        *((over, dtype) for dtype in CACHED),
    ],
)
def test_buffers_are_written_on_the_gpu_where_they_lie(write, dtype):
    """Without a kernel there, TensorFlow copied them to the CPU and back."""

    @tf.function(autograph=False)
    def written(device, buffer):
        with tf.device(device):
            return write(buffer, tf.constant(2), tf.cast([1, 0], dtype))

    buffer = tf.cast([[0, 1], [1, 1], [0, 0]], dtype)
    on_gpu = written.get_concrete_function("GPU:0", buffer).graph
    for _, op in operations_within(on_gpu):
        check_devices("any", "GPU:0", [op.node_def])
        # Their kernels are for any dtype, but refuse some when they run.
        assert op.type not in ("InplaceUpdate", "DeepCopy") or op.get_attr("T") != tf.bfloat16
    found, kept = written("CPU:0", buffer), tf.cast(buffer, tf.int32)
    assert tf.cast(found, tf.int32).numpy().tolist() == [[0, 1], [1, 1], [1, 0]]
    assert kept.numpy().tolist() == [[0, 1], [1, 1], [0, 0]]
