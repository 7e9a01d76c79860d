"""A microbatch draws its slice of the whole batch's random numbers, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import PipelineError
from pipemesh.randomness import (
    NeedWholeDraws,
    Position,
    WholeDraw,
    WholeDraws,
    advance_counter,
    draw_seed,
    layer_aliases,
    layer_scope,
    loop_scope,
    plan_free_randomness,
)

STEP = tf.constant(3, tf.int64)
SEED = [5, 6]
DRAWS = {
    "stateless_uniform": lambda s: tf.random.stateless_uniform(s, SEED),
    "stateless_uniform_range": lambda s: tf.random.stateless_uniform(s, SEED, -2.0, 3.0),
    "stateless_uniform_half": lambda s: tf.random.stateless_uniform(s, SEED, dtype=tf.float16),
    "stateless_uniform_bfloat16": lambda s: tf.random.stateless_uniform(s, SEED, dtype=tf.bfloat16),
    "stateless_uniform_double": lambda s: tf.random.stateless_uniform(s, SEED, dtype=tf.float64),
    "stateless_uniform_int32": lambda s: tf.random.stateless_uniform(s, SEED, 0, 99, tf.int32),
    "stateless_uniform_int64": lambda s: tf.random.stateless_uniform(s, SEED, 0, 99, tf.int64),
    "stateless_full_int": lambda s: tf.random.stateless_uniform(s, SEED, None, None, tf.int32),
    "stateless_normal": lambda s: tf.random.stateless_normal(s, SEED),
    "stateless_normal_double": lambda s: tf.random.stateless_normal(s, SEED, dtype=tf.float64),
    "stateless_truncated": lambda s: tf.random.stateless_truncated_normal(s, SEED),
    "stateless_philox": lambda s: tf.random.stateless_uniform(s, SEED, alg="philox"),
    "uniform": lambda s: tf.random.uniform(s),
    "uniform_seeded": lambda s: tf.random.uniform(s, seed=8),
    "uniform_int": lambda s: tf.random.uniform(s, 0, 99, tf.int32),
    "normal": lambda s: tf.random.normal(s),
    "truncated": lambda s: tf.random.truncated_normal(s),
    "dropout": lambda s: tf.nn.dropout(tf.ones(s), 0.5),
    "stateless_dropout": lambda s: tf.nn.experimental.stateless_dropout(tf.ones(s), 0.5, SEED),
}


def whole_and_parts(draw, whole_shape, micro_shape, num_microbatches, size=None, before=None):
    with plan_free_randomness(STEP) as drawn, layer_scope("layer"):
        whole = draw(whole_shape)
    parts = []
    for m in range(num_microbatches):
        position = Position(
            tf.constant(m, tf.int64),
            num_microbatches,
            size or micro_shape[0],
            WholeDraws(drawn, lambda name, dim, folded: before),
        )
        with plan_free_randomness(STEP, position), layer_scope("layer"):
            parts.append(draw(micro_shape).numpy())
    return whole.numpy(), parts


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rest", [(4,), (3,), (5, 7)])
def test_every_kind_of_draw(name, rest):
    whole, parts = whole_and_parts(DRAWS[name], [6, *rest], [2, *rest], 3)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole)) > 1


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
        DRAWS["stateless_uniform"], whole_shape, micro, num_microbatches, micro[dim], before=1
    )
    np.testing.assert_array_equal(np.concatenate(parts, axis=dim), whole)


def test_dims_folded_into_the_batch_keep_their_order():
    batch, time, num = 6, 5, 3
    whole, parts = whole_and_parts(
        DRAWS["normal"], [batch * time], [batch * time // num], num, batch // num, before=1
    )
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    # [time, batch] -> [time * batch]: the batch varies fastest.
    whole, parts = whole_and_parts(
        DRAWS["normal"], [time * batch], [time * batch // num], num, batch // num, before=time
    )
    joined = np.concatenate([p.reshape(time, batch // num) for p in parts], axis=1)
    np.testing.assert_array_equal(joined, whole.reshape(time, batch))


def test_a_draw_without_batch_is_the_same_for_every_microbatch():
    whole, parts = whole_and_parts(DRAWS["normal"], [4, 4], [4, 4], 3)
    for part in parts:
        np.testing.assert_array_equal(part, whole)


def test_the_counter_carries_into_its_high_word():
    counter = tf.constant([2**64 - 1, 7], tf.uint64)
    assert advance_counter(counter, tf.constant(3, tf.int64)).numpy().tolist() == [2, 8]


def test_what_tensorflow_draws_for_the_whole_batch_is_not_changed():
    expected = tf.random.stateless_uniform([3, 5], SEED)
    with plan_free_randomness(STEP):
        np.testing.assert_array_equal(tf.random.stateless_uniform([3, 5], SEED), expected)


def test_outside_of_a_scope_nothing_changes():
    with plan_free_randomness(STEP):
        tf.random.uniform([2])
    tf.random.set_seed(1)
    first = tf.random.uniform([4]).numpy()
    assert (tf.random.uniform([4]).numpy() != first).all()
    tf.random.set_seed(1)
    np.testing.assert_array_equal(tf.random.uniform([4]), first)


def draw_in(step=3, layer="layer", seed=None, skip=0):
    with plan_free_randomness(tf.constant(step, tf.int64)), layer_scope(layer):
        for _ in range(skip):
            tf.random.uniform([1])
        return tf.random.uniform([8], seed=seed).numpy().tolist()


def test_stateful_draws_depend_on_step_layer_number_and_seed_alone():
    draws = [
        draw_in(),
        draw_in(step=4),
        draw_in(layer="other"),
        draw_in(seed=1),
        draw_in(seed=2),
        draw_in(skip=1),
    ]
    assert len(set(map(tuple, draws))) == len(draws)
    tf.random.uniform([3])
    assert draw_in() == draws[0]


def test_draws_of_one_layer_do_not_depend_on_other_layers():
    with plan_free_randomness(STEP):
        with layer_scope("a"):
            tf.random.uniform([2])
        with layer_scope("b"):
            after = tf.random.uniform([8]).numpy().tolist()
    assert after == draw_in(layer="b")


def test_aliases_rename_the_outermost_layer():
    with plan_free_randomness(STEP), layer_aliases({"b": "c"}), layer_scope("b"):
        renamed = tf.random.uniform([8]).numpy().tolist()
    assert renamed == draw_in(layer="c")


def test_seeds_of_one_layer_differ_from_draw_to_draw():
    with plan_free_randomness(STEP), layer_scope("a"):
        first, second = draw_seed().numpy().tolist(), draw_seed().numpy().tolist()
    assert first[0] == second[0] == 3
    assert first[1] != second[1]


def position(whole_shapes, num_microbatches=2, layer="noisy"):
    drawn = {f"{layer}:{i}": WholeDraw(sizes) for i, sizes in enumerate(whole_shapes or ())}
    whole = None if whole_shapes is None else WholeDraws(drawn, lambda name, dim, folded: 1)
    return Position(tf.constant(0, tf.int64), num_microbatches, 2, whole)


def test_a_microbatch_asks_for_what_the_whole_batch_draws_first():
    with pytest.raises(NeedWholeDraws), plan_free_randomness(STEP, position(None)):
        tf.random.uniform([2])


@pytest.mark.parametrize(
    ("call", "whole", "message"),
    [
        (lambda: tf.random.uniform([2]), (), "more random tensors for a microbatch"),
        (lambda: tf.random.uniform([2]), ((5,),), r"shape \(2,\) for a microbatch and \(5,\)"),
        (lambda: tf.random.uniform([2, 2]), ((4, 4),), "one dim may differ, by the factor 2"),
        (lambda: tf.random.shuffle(tf.range(4)), (), "'random_shuffle' inside a pipeline"),
        (lambda: tf.random.gamma([2], 1.0), (), "'random_gamma'"),
        (
            lambda: tf.random.stateless_categorical(tf.zeros([2, 3]), 1, SEED),
            (),
            "'stateless_multinomial'",
        ),
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


def test_a_keyed_draw_needs_a_step():
    with pytest.raises(PipelineError, match="keyed by the global step"), plan_free_randomness(None):
        tf.random.uniform([2])


def test_draws_in_loops_differ_by_iteration_by_loop_and_by_nesting():
    def draw(first, second):
        with loop_scope(tf.constant(first, tf.int64)):
            outer = tf.random.uniform([4])
            with loop_scope(tf.constant(second, tf.int64)), layer_scope("inner"):
                return [outer, tf.random.uniform([4]), tf.nn.dropout(tf.ones([64]), 0.5)]

    drawn = []
    for pair in [(0, 1), (1, 0), (1, 1), (0, 1)]:
        with plan_free_randomness(STEP):
            drawn.append([t.numpy().tobytes() for t in draw(*pair)])
    assert drawn[0] == drawn[3]
    assert drawn[1][0] == drawn[2][0] != drawn[0][0]
    for number in (1, 2):
        assert len({numbers[number] for numbers in drawn}) == 3
    with plan_free_randomness(STEP):
        first, second = draw(0, 1), draw(0, 1)
    assert not np.array_equal(first[0], second[0])


def test_a_loop_tells_which_tensors_its_draws_depend_on():
    outer, inner = tf.constant(1, tf.int64), tf.constant(2, tf.int64)
    where = position(())
    with plan_free_randomness(STEP, where), loop_scope(outer) as first, loop_scope(inner) as second:
        assert [t is u for t, u in zip(first, [STEP, where.microbatch], strict=True)] == [True] * 2
        assert second[-1] is outer
    with loop_scope(outer) as nothing:
        assert nothing == []
