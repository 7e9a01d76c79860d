"""Draws of a microbatch are a part of the whole batch's."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.randomness.draws import advance_counter, check_no_draw_escaped, draw_block, note_draw
from pipemesh.randomness.scope import (
    NeedWholeDraws,
    Position,
    WholeDraw,
    WholeDraws,
    gradient_scope,
)
from tests.pairwise import pairwise
from tests.randomness.microbatches import STEP, position, whole_and_parts


def uniform(shape):
    return tf.random.stateless_uniform(shape, [5, 6])


def normal(shape):
    return tf.random.normal(shape)


def test_dims_folded_into_the_batch_keep_their_order():
    batch, time, num = 6, 5, 3
    whole, parts = whole_and_parts(
        normal, [batch * time], [batch * time // num], num, batch // num, before=1
    )
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    # [time, batch] -> [time * batch]: the batch varies fastest.
    whole, parts = whole_and_parts(
        normal, [time * batch], [time * batch // num], num, batch // num, before=time
    )
    joined = np.concatenate([p.reshape(time, batch // num) for p in parts], axis=1)
    np.testing.assert_array_equal(joined, whole.reshape(time, batch))


def test_a_number_may_be_for_several_neighbouring_examples():
    whole, parts = whole_and_parts(normal, [6], [2], 3, size=4)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def pieces(draw, micro, batch_dim, sequence_dim, count, slices):
    """The whole batch's numbers, and those of each slice of the sequences of each microbatch."""
    of_batch, of_sequences, whole_shape = list(micro), list(micro), list(micro)
    for dim, factor, shape in (
        (batch_dim, count, of_batch),
        (sequence_dim, slices, of_sequences),
    ):
        if dim is not None:
            shape[dim] *= factor
            whole_shape[dim] *= factor
    drawn = [{"layer:0": WholeDraw(tuple(shape))} for shape in (of_batch, of_sequences)]
    known = WholeDraws(drawn[0], lambda name, dim, folded: 1, drawn[1])
    with plan_free_randomness(STEP), layer_scope("layer"):
        whole = draw(whole_shape).numpy()
    size = micro[sequence_dim] if sequence_dim is not None else 3
    examples = micro[batch_dim] if batch_dim is not None else 2

    # As in a pipeline, the numbers of microbatch and slice are known only at run time.
    @tf.function(autograph=False)
    def part(m, q):
        where = Position(m, count, examples, known)
        if slices > 1:
            where = dataclasses.replace(where, num_slices=slices, slice_size=size, slice=q)
        with plan_free_randomness(STEP, where), layer_scope("layer"):
            return draw(micro)

    numbers = np.ndindex(count, slices)
    return whole, {(m, q): part(*map(tf.constant, np.int64([m, q]))).numpy() for m, q in numbers}


@settings(max_examples=25, deadline=None)
@given(
    micro=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    count=st.integers(1, 4),
    slices=st.integers(1, 3),
    draw=st.sampled_from([uniform, normal, tf.random.truncated_normal]),
    data=st.data(),
)
def test_microbatches_and_slices_draw_their_part_of_the_whole_batch(
    micro, count, slices, draw, data
):
    dims = data.draw(st.permutations(range(len(micro))))
    batch_dim = data.draw(st.sampled_from([None, dims[0]]))
    sequence_dim = data.draw(st.sampled_from([None, *dims[1:2]]))
    whole, found = pieces(draw, micro, batch_dim, sequence_dim, count, slices)
    for (m, q), part in found.items():
        wanted = whole
        if batch_dim is not None:
            wanted = np.split(wanted, count, batch_dim)[m]
        if sequence_dim is not None:
            wanted = np.split(wanted, slices, sequence_dim)[q]
        np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize(
    ("sizes", "of_batch", "of_sequences", "text"),
    [
        (
            (2, 6),
            (4, 6),
            (2, 12),
            r"\(2, 12\) for whole ones; one dim may differ, and is the 3 pos",
        ),
        ((2, 3, 3), (4, 3, 3), (2, 6, 6), r"one dim may differ"),
        ((3,), (6,), (6,), r"in whose dim 0 examples and positions of sequences are folded"),
        ((2, 3), (4, 3), None, r"draws more random tensors for a slice .* than for whole ones"),
    ],
)
def test_draws_that_cannot_be_cut_into_slices_are_errors(sizes, of_batch, of_sequences, text):
    drawn = {} if of_sequences is None else {"noisy:0": WholeDraw(of_sequences)}
    known = WholeDraws({"noisy:0": WholeDraw(of_batch)}, lambda name, dim, folded: 1, drawn)
    zero = tf.constant(0, tf.int64)
    where = Position(zero, 2, 2, known, 2, 3, zero)
    with plan_free_randomness(STEP, where), layer_scope("noisy"):
        with pytest.raises(PipelineError, match=text):
            uniform(sizes)


def test_parts_need_the_draws_of_the_whole_batch():
    zero = tf.constant(0, tf.int64)
    sliced = Position(zero, 1, 2, None, 2, 3, zero)
    for where in (sliced, position(None)):
        with plan_free_randomness(STEP, where), pytest.raises(NeedWholeDraws):
            uniform([2, 3])
    with plan_free_randomness(STEP, sliced), pytest.raises(PipelineError, match="gamma"):
        tf.random.stateless_gamma([2, 3], [1, 2], 1.0)


@settings(max_examples=30)
@given(st.integers(0, 2**128 - 1), st.integers(0, 2**63 - 1))
def test_the_counter_is_one_number_of_128_bits(counter, steps):
    words = tf.constant([counter % 2**64, counter >> 64], tf.uint64)
    low, high = advance_counter(words, tf.constant(steps, tf.int64)).numpy().tolist()
    assert (high << 64) + low == (counter + steps) % 2**128


@pytest.mark.parametrize(
    ("sizes", "whole", "message"),
    [
        ([2], (), "more random tensors for a microbatch"),
        ([2], ((5,),), r"shape \(2,\) for a microbatch and \(5,\)"),
        ([2, 2], ((4, 4),), "one dim may differ, by the factor 2"),
    ],
)
def test_draws_that_cannot_be_cut_are_errors_that_name_the_layer(sizes, whole, message):
    with plan_free_randomness(STEP, position(whole)), layer_scope("noisy"):
        with pytest.raises(PipelineError, match=f"'noisy' draws .*{message}"):
            uniform(sizes)


def test_shapes_known_only_at_run_time_are_errors():
    @tf.function
    def run(size):
        with plan_free_randomness(STEP, position(((4,),))), layer_scope("noisy"):
            return tf.random.uniform(size[None])

    with pytest.raises(PipelineError, match="'noisy' draws random numbers of a shape"):
        run(tf.constant(2))


def test_gradients_draw_nothing_but_single_numbers():
    with plan_free_randomness(STEP), gradient_scope():
        assert note_draw(()) == ":0"
        with pytest.raises(PipelineError, match=r"of shape \(2, 3\) are drawn while gradients"):
            tf.random.uniform([2, 3])
    with plan_free_randomness(STEP):
        assert note_draw((2, 3)) == ":0"


def test_draws_are_noted_by_layer_and_number_with_their_sizes():
    with plan_free_randomness(STEP) as drawn, layer_scope("a"):
        tf.random.uniform([2])
        with layer_scope("b"):
            tf.random.normal([3, 4])
        tf.random.uniform([])
    assert {name: draw.sizes for name, draw in drawn.items()} == {
        "a:0": (2,),
        "a/b:0": (3, 4),
        "a:1": (),
    }


SEED = tf.constant([5, 6], tf.int64)
UNIFORM, NORMAL = tf.raw_ops.StatelessRandomUniformV2, tf.raw_ops.StatelessRandomNormalV2


def block_of(raw, sizes, begin, block, dtype=tf.float32):
    return draw_block(raw, sizes, [tf.constant(at) for at in begin], block, SEED, dtype).numpy()


BLOCKS = [
    ((0, 0, 0), (6, 5, 7)),
    ((2, 0, 0), (3, 5, 7)),
    ((1, 0, 0), (1, 5, 7)),
    ((1, 2, 0), (1, 3, 7)),
    ((1, 2, 3), (1, 1, 3)),
    ((5, 4, 6), (1, 1, 1)),
    ((1, 2, 3), (2, 2, 2)),
    ((0, 2, 0), (6, 2, 7)),
    ((0, 0, 0), (6, 0, 7)),
]


@pytest.mark.parametrize(
    ("begin", "block", "dtype", "raw"),
    pairwise(BLOCKS, [tf.float32, tf.float64, tf.bfloat16], [UNIFORM, NORMAL]),
)
def test_a_block_is_a_part_of_the_whole(begin, block, dtype, raw):
    sizes = (6, 5, 7)
    whole = block_of(raw, sizes, (0, 0, 0), sizes, dtype)
    part = tuple(slice(at, at + size) for at, size in zip(begin, block, strict=True))
    found = block_of(raw, sizes, begin, block, dtype)
    assert found.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(found, whole[part])


def test_the_whole_block_equals_tensorflows_draw():
    want = tf.random.stateless_normal([3, 5], SEED, alg="philox")
    np.testing.assert_array_equal(block_of(NORMAL, (3, 5), (0, 0), (3, 5)), want)


@pytest.mark.parametrize("begin", [500, tf.constant(500)])
def test_of_leading_dims_no_other_numbers_are_drawn(begin):
    shapes = []

    def raw(shape, **kwargs):
        shapes.append(tuple(shape.numpy()))
        return UNIFORM(shape=shape, **kwargs)

    block = draw_block(raw, (1000, 12), [begin, 0], (2, 12), SEED, tf.float32)
    assert shapes == [(2, 12)]
    np.testing.assert_array_equal(block, block_of(UNIFORM, (1000, 12), (0, 0), (1000, 12))[500:502])
    # Rows of 10 begin within a group of 4 numbers.
    draw_block(raw, (1000, 10), [begin + 1, 0], (2, 10), SEED, tf.float32)
    assert shapes[1:] == [(2 * 10 + 3,)]


@pytest.mark.parametrize("sizes", [(6, 5, 7), (6, 4, 8)])
def test_a_block_may_begin_at_a_dynamic_index(sizes):
    run = tf.function(
        lambda at: draw_block(UNIFORM, sizes, [at, 1, 0], (1, 2, sizes[2]), SEED, tf.float32)
    )
    whole = block_of(UNIFORM, sizes, (0, 0, 0), sizes)
    for at in range(sizes[0]):
        np.testing.assert_array_equal(run(tf.constant(at)), whole[at : at + 1, 1:3])


def stateful():
    return tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32)


def stateless():
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[1, 2])
    return tf.raw_ops.StatelessRandomUniformV2(shape=[2], key=key, counter=counter, alg=1)


@tf.function(autograph=False)
def drawing():
    return tf.random.normal([2])


@pytest.mark.parametrize(
    ("function", "num_microbatches", "error"),
    [
        (lambda: tf.random.normal([2]), 2, None),
        (lambda: tf.random.stateless_uniform([2], [1, 2]), 2, None),
        (lambda: tf.nn.dropout(tf.ones([2]), 0.5), 2, None),
        (drawing, 2, None),
        (lambda: tf.cond(tf.constant(True), lambda: uniform([2]), lambda: tf.zeros([2])), 2, None),
        (lambda: tf.sin(1.0), 2, None),
        (stateful, 1, r"^stage 's0' .* RandomStandardNormal .* would differ .*tf\.raw_ops"),
        (stateless, 2, r"StatelessRandomUniformV2 .* the same for every microbatch.*raw_ops"),
        (stateless, 1, None),
        (
            drawing.get_concrete_function(),
            2,
            r"in the function '.*drawing.*', which was .*outside",
        ),
    ],
)
def test_draws_outside_of_a_scope_are_errors(function, num_microbatches, error):
    def stage():
        with plan_free_randomness(STEP):
            return function()

    graph = tf.function(stage, autograph=False).get_concrete_function().graph
    with pytest.raises(PipelineError, match=error) if error else contextlib.nullcontext():
        check_no_draw_escaped(graph, "s0", num_microbatches)
