"""Functions and eager loops draw as if their code stood where it is called."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.randomness import layer_scope, plan_free_randomness


def draws(function, step=3, layer="layer", calls=2, whole=False):
    """Returns draws of calls in a scope and of one draw after them; `whole` in a graph."""

    def run(number):
        with plan_free_randomness(number), layer_scope(layer):
            return [*(function() for _ in range(calls)), tf.random.uniform([4])]

    run = tf.function(run, autograph=False) if whole else run
    return [t.numpy().tolist() for t in run(tf.constant(step, tf.int64))]


def make(traces):
    def plain():
        traces.append(1)
        return tf.random.uniform([4])

    return plain, tf.function(plain, autograph=False)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"step": 4}, {"layer": "other"}, {"calls": 3}])
def test_a_function_draws_the_numbers_of_its_code(whole, kwargs):
    plain, function = make([])
    found = draws(function, whole=whole, **kwargs)
    assert found == draws(plain, whole=whole, **kwargs)
    assert len(np.unique(found, axis=0)) == len(found)


def test_a_trace_is_reused_at_equal_positions_with_a_new_step():
    traces = []
    plain, function = make(traces)
    first = draws(function)
    assert len(traces) == 2, "one for each place"
    assert draws(function) == first
    second = draws(function, step=4)
    assert len(traces) == 2 and second == draws(plain, step=4) != first


def test_outside_of_a_scope_a_function_is_traced_once_for_all():
    traces = []
    _, function = make(traces)
    draws(function)
    del traces[:]
    assert not np.array_equal(function(), function())
    assert len(traces) == 1


def test_a_concrete_function_requested_inside_is_new():
    traces = []
    _, function = make(traces)
    with plan_free_randomness(tf.constant(3, tf.int64)):
        found = [function.get_concrete_function()() for _ in range(2)]
    assert len(traces) == 2 and not np.array_equal(*found)


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
def test_eager_loops_draw_the_numbers_of_graph_loops(draw):
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
