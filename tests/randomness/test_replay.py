"""What is computed once more for a gradient draws the same numbers."""

import numpy as np
import tensorflow as tf

from pipemesh.randomness import Replay, layer_scope, loop_scope, plan_free_randomness
from tests.randomness.microbatches import STEP


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


def test_a_function_that_captures_nothing_takes_what_draws_depend_on_as_arguments():
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


def test_outside_of_a_scope_there_is_nothing_to_remember():
    replay = Replay()
    assert replay.tensors == []
    tf.random.set_seed(1)
    with replay.enter([]):
        first = numbers(1)
    tf.random.set_seed(1)
    assert numbers(1) == first
