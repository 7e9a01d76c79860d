"""A microbatch draws its slice of the whole batch's random numbers, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import PipelineError
from pipemesh.randomness import (
    NeedWholeDraws,
    advance_counter,
    gradient_scope,
    layer_scope,
    note_draw,
    plan_free_randomness,
)
from tests.randomness.microbatches import STEP, position, whole_and_parts


def uniform(shape):
    return tf.random.stateless_uniform(shape, [5, 6])


def normal(shape):
    return tf.random.normal(shape)


@settings(max_examples=60, deadline=None)
@given(
    micro=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    num_microbatches=st.integers(2, 5),
    data=st.data(),
)
def test_the_batch_may_lie_in_any_dim(micro, num_microbatches, data):
    dim = data.draw(st.integers(0, len(micro) - 1))
    whole_shape = list(micro)
    whole_shape[dim] *= num_microbatches
    whole, parts = whole_and_parts(
        lambda s: tf.random.stateless_uniform(s, [5, 6]),
        whole_shape,
        micro,
        num_microbatches,
        micro[dim],
        before=1,
    )
    np.testing.assert_array_equal(np.concatenate(parts, axis=dim), whole)


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


def test_a_draw_without_batch_is_the_same_for_every_microbatch():
    whole, parts = whole_and_parts(normal, [4, 4], [4, 4], 3)
    for part in parts:
        np.testing.assert_array_equal(part, whole)


@settings(max_examples=30)
@given(st.integers(0, 2**128 - 1), st.integers(0, 2**63 - 1))
def test_the_counter_is_one_number_of_128_bits(counter, steps):
    words = tf.constant([counter % 2**64, counter >> 64], tf.uint64)
    low, high = advance_counter(words, tf.constant(steps, tf.int64)).numpy().tolist()
    assert (high << 64) + low == (counter + steps) % 2**128


def test_a_microbatch_asks_for_what_the_whole_batch_draws_first():
    with pytest.raises(NeedWholeDraws), plan_free_randomness(STEP, position(None)):
        tf.random.uniform([2])


@pytest.mark.parametrize(
    ("call", "whole", "message"),
    [
        (lambda: tf.random.uniform([2]), (), "more random tensors for a microbatch"),
        (lambda: tf.random.uniform([2]), ((5,),), r"shape \(2,\) for a microbatch and \(5,\)"),
        (lambda: tf.random.uniform([2, 2]), ((4, 4),), "one dim may differ, by the factor 2"),
    ],
)
def test_draws_that_cannot_be_cut_are_errors_that_name_the_layer(call, whole, message):
    with (
        pytest.raises(PipelineError, match=message),
        plan_free_randomness(STEP, position(whole)),
        layer_scope("noisy"),
    ):
        call()


def test_shapes_known_only_at_run_time_are_errors():
    @tf.function
    def run(size):
        with plan_free_randomness(STEP, position(((4,),))), layer_scope("noisy"):
            return tf.random.uniform(size[None])

    with pytest.raises(PipelineError, match="'noisy' draws random numbers of a shape"):
        run(tf.constant(2))


def test_what_is_drawn_for_a_gradient_is_an_error_unless_it_is_a_single_number():
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
