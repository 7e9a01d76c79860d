"""Scopes of random numbers, and draws that are made once more."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import draw_seed, layer_scope, plan_free_randomness
from pipemesh.randomness.scope import (
    Replay,
    alike_layers_scope,
    gradient_scope,
    is_active,
    layer_aliases,
    layer_spans,
    loop_scope,
)
from tests.randomness.microbatches import STEP, position


def draw_in(step=3, layer="layer", seed=None, skip=0, aliases=None, stack=""):
    with plan_free_randomness(step), layer_aliases(aliases or {}, stack), layer_scope(layer):
        for _ in range(skip):
            tf.random.uniform([1])
        return tf.random.uniform([8], seed=seed).numpy().tolist()


def test_stateful_draws_depend_on_step_layer_stack_number_and_seed():
    draws = [
        draw_in(),
        draw_in(step=4),
        draw_in(layer="other"),
        draw_in(seed=1),
        draw_in(seed=2),
        draw_in(skip=1),
        draw_in(stack="left"),
        draw_in(stack="right"),
    ]
    assert len(set(map(tuple, draws))) == len(draws)
    tf.random.uniform([3])
    assert draw_in() == draws[0]


def test_draws_of_a_layer_do_not_depend_on_others():
    with plan_free_randomness(STEP):
        with layer_aliases({"a": "c"}), layer_scope("a"):
            renamed = tf.random.uniform([8]).numpy().tolist()
        with layer_scope("a"):
            behind = tf.random.uniform([8]).numpy().tolist()
    assert renamed == draw_in(layer="c") == draw_in(layer="a", aliases={"a": "c"})
    assert behind == draw_in(layer="a")


def test_seeds_differ_from_draw_to_draw():
    with plan_free_randomness(STEP), layer_scope("a"):
        first, second = draw_seed().numpy().tolist(), draw_seed().numpy().tolist()
    assert first[0] == second[0] == 3
    assert first[1] != second[1]


def test_a_keyed_draw_needs_a_step():
    with pytest.raises(PipelineError, match="keyed by the global step"), plan_free_randomness(None):
        tf.random.uniform([2])


def test_draws_differ_by_iteration_loop_and_nesting():
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


def test_alike_layers_have_a_row_of_seeds_each():
    def seeds(scope):
        with plan_free_randomness(STEP), layer_aliases({"b": "c"}, "stack"), scope:
            first = draw_seed()
            with layer_scope("inner"), loop_scope(tf.constant(5, tf.int64)):
                return [first.numpy().tolist(), draw_seed().numpy().tolist()]

    rows = seeds(alike_layers_scope(["a", "b"]))
    each = [seeds(layer_scope(name)) for name in ("a", "b")]
    assert rows == [[one, two] for one, two in zip(*each, strict=True)]
    assert each[0] != each[1]


def test_outermost_layers_tell_which_operations_are_theirs():
    with tf.Graph().as_default() as graph, plan_free_randomness(STEP):
        with layer_scope("a"):
            tf.zeros([2])
            with layer_scope("inside"):
                tf.ones([2])
        tf.ones([3])
        with layer_scope("b"):
            pass
        spans = [(span.layer, span.begin, span.end) for span in layer_spans()]
        number = len(graph.get_operations())
    assert [name for name, _, _ in spans] == ["a", "b"]
    (_, begin, end), (_, empty, same) = spans
    assert 0 == begin < end < empty == same == number


def test_a_scope_is_that_of_its_thread_and_of_nothing_behind_it():
    seen = []
    with plan_free_randomness(STEP):
        thread = threading.Thread(target=lambda: seen.append(is_active()))
        thread.start()
        thread.join()
        seen.append(is_active())
    seen.append(is_active())
    with pytest.raises(ZeroDivisionError), plan_free_randomness(STEP), layer_scope("a"):
        raise ZeroDivisionError
    assert [*seen, is_active()] == [False, True, False, False]


def test_without_a_step_a_gradient_may_draw_a_single_number():
    with plan_free_randomness(None), gradient_scope():
        assert draw_seed().numpy().tolist() == [0, 0]
    with gradient_scope(), layer_scope("a"):
        assert not is_active()


def test_draws_stay_refused_after_a_gradient_of_a_gradient():
    of_noisy = position(((4, 3),))
    with plan_free_randomness(STEP, of_noisy), layer_scope("noisy"), gradient_scope():
        with gradient_scope():
            pass
        with pytest.raises(PipelineError, match=r"of shape \(2, 3\) are drawn while gradients"):
            tf.random.uniform([2, 3])


def numbers(count=2):
    return [tf.random.uniform([4]).numpy().tolist() for _ in range(count)]


def test_each_time_the_numbers_that_came_next():
    with plan_free_randomness(STEP), layer_scope("a"):
        plain = numbers(5)
    with plan_free_randomness(STEP), layer_scope("a"):
        found = numbers(1)
        replay = Replay()
        with replay.enter(replay.tensors):
            first = numbers()
        with replay.enter(replay.tensors):
            again = numbers()
        behind = numbers()
    assert found == plain[:1]
    assert first == again == plain[1:3]
    # What comes behind counts them once.
    assert behind == plain[3:]


def test_a_replay_takes_its_tensors_as_arguments():
    iteration = tf.constant(2, tf.int64)
    with plan_free_randomness(STEP), loop_scope(iteration):
        replay = Replay()
        assert [t is u for t, u in zip(replay.tensors, [STEP, iteration], strict=True)] == [
            True
        ] * 2

        @tf.function(autograph=False)
        def drawn(*tensors):
            with replay.enter(tensors):
                return tf.random.uniform([4])

        expected = drawn(*replay.tensors)
        np.testing.assert_array_equal(drawn(*replay.tensors), expected)
        for other in [(STEP + 1, iteration), (STEP, iteration + 1)]:
            assert not np.array_equal(drawn(*other), expected)


def test_a_replay_outside_a_scope_is_empty():
    replay = Replay()
    assert replay.tensors == []
    tf.random.set_seed(1)
    with replay.enter([]):
        first = numbers(1)
    tf.random.set_seed(1)
    assert numbers(1) == first
