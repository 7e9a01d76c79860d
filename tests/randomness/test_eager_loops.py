"""A `tf.while_loop` in eager mode draws what it draws in a graph."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.randomness import layer_scope, plan_free_randomness

STEP = tf.constant(3, tf.int64)


def looped(turns=3):
    def body(i, drawn):
        return i + 1, tf.concat([drawn[1:], tf.random.uniform([1, 4])], 0)

    return tf.while_loop(lambda i, _: i < turns, body, (0, tf.zeros([turns, 4])))[1]


def nested():
    def body(i, drawn):
        return i + 1, tf.concat([drawn[1:], looped(2)[None]], 0)

    return tf.while_loop(lambda i, _: i < 3, body, (0, tf.zeros([3, 2, 4])))[1]


def around():
    """Draws before, in, and behind two loops."""
    before = tf.random.uniform([1, 4])
    return tf.concat([before, looped(), looped(), tf.random.uniform([1, 4])], 0)


@pytest.mark.parametrize("draw", [looped, nested, around])
def test_eager_loops_draw_what_those_of_graphs_draw(draw):
    def run():
        with plan_free_randomness(STEP), layer_scope("layer"):
            return draw()

    eager, graph = run().numpy(), tf.function(run, autograph=False)().numpy()
    np.testing.assert_array_equal(eager, graph)
    rows = eager.reshape([-1, 4])
    assert len(np.unique(rows, axis=0)) == len(rows), "every turn has numbers of its own"


def test_a_loop_that_fails_leaves_no_turns_behind():
    def fail(i):
        raise ValueError("mine")

    def run(before):
        with plan_free_randomness(STEP):
            before()
            with layer_scope("layer"):
                return tf.random.uniform([4]).numpy()

    def failing():
        with pytest.raises(ValueError, match="mine"):
            tf.while_loop(lambda i: i < 3, fail, (0,))

    np.testing.assert_array_equal(run(failing), run(lambda: None))


def test_outside_of_a_scope_a_loop_is_tensorflows():
    turns, _ = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x), (0, 7))
    assert turns.numpy() == 3
