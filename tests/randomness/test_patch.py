"""Random operations, functions and loops inside and outside a scope."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.patches import operation
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.randomness.patch import install
from pipemesh.randomness.scope import slicewise
from tests.randomness.microbatches import STEP, position, whole_and_parts

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


# Rows of (4,) are whole groups of the generator's numbers.
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        *((name, (5, 7)) for name in DRAWS),
        *((name, (4,)) for name in ("stateless_uniform", "stateless_uniform_double", "truncated")),
        *((name, (3,)) for name in ("stateless_uniform", "stateless_uniform_half", "dropout")),
    ],
)
def test_every_kind_of_draw(name, rest):
    whole, parts = whole_and_parts(DRAWS[name], [6, *rest], [2, *rest], 3)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole)) > 1


def test_the_whole_batch_draws_tensorflows_numbers():
    expected = tf.random.stateless_uniform([3, 5], SEED)
    with plan_free_randomness(STEP):
        np.testing.assert_array_equal(tf.random.stateless_uniform([3, 5], SEED), expected)


def test_a_scope_changes_no_draws_outside():
    tf.random.set_seed(1)
    expected = [tf.random.uniform([4]).numpy().tolist() for _ in range(2)]
    assert expected[0] != expected[1]
    tf.random.set_seed(1)
    found = [tf.random.uniform([4]).numpy().tolist()]
    with plan_free_randomness(STEP):
        tf.random.uniform([4])
        tf.random.truncated_normal([4])
    found.append(tf.random.uniform([4]).numpy().tolist())
    assert found == expected


def test_outside_each_operation_of_a_graph_has_a_seed_of_its_own():
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(7)
        ops = [tf.random.uniform([4]).op for _ in range(2)]
    assert [op.get_attr("seed") for op in ops] == [7, 7]
    assert len({op.get_attr("seed2") for op in ops}) == 2


UNCUTTABLE = {
    "random_shuffle": lambda: tf.random.shuffle(tf.range(4)),
    "random_gamma": lambda: tf.random.gamma([2], 1.0),
    "random_poisson_v2": lambda: tf.random.poisson([2], 1.0),
    "multinomial": lambda: tf.random.categorical(tf.zeros([2, 3]), 1),
    "stateless_multinomial": lambda: tf.random.stateless_categorical(tf.zeros([2, 3]), 1, SEED),
    "stateless_random_binomial": lambda: tf.random.stateless_binomial([2], SEED, 3.0, 0.5),
    "stateless_random_gamma_v3": lambda: tf.random.stateless_gamma([2], SEED, 1.0),
    "stateless_random_poisson": lambda: tf.random.stateless_poisson([2], SEED, 1.0),
    "stateless_shuffle": lambda: tf.random.experimental.stateless_shuffle(tf.range(4), SEED),
}


@pytest.mark.parametrize("name", UNCUTTABLE)
def test_uncuttable_draws_are_errors_with_microbatches(name):
    call, message = UNCUTTABLE[name], f"layer 'noisy' calls '{name}' inside a pipeline"
    with (
        pytest.raises(PipelineError, match=message),
        plan_free_randomness(STEP, position(())),
        layer_scope("noisy"),
    ):
        call()
    # What has no state draws the same for one microbatch that is the whole batch.
    with plan_free_randomness(STEP, position((), num_microbatches=1)):
        if name.startswith("stateless"):
            np.testing.assert_array_equal(call(), call())
        else:
            with pytest.raises(PipelineError, match=f"'{name}' inside a pipeline"):
                call()
    call()


@pytest.mark.parametrize(
    "call", [tf.random.uniform, lambda s: tf.random.stateless_uniform(s, SEED), tf.random.shuffle]
)
def test_where_each_processor_has_a_slice_no_operation_draws(call):
    with pytest.raises(LayoutError, match=r"random.* draws no slices here"):
        with slicewise("draws no slices here"):
            call([4])


def test_dispatchers_are_put_in_place_once():
    before = operation("random_uniform")
    install()
    assert operation("random_uniform") is before


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


@pytest.mark.parametrize(
    ("kwargs", "whole"),
    [({}, False), ({"step": 4}, True), ({"layer": "other"}, False), ({"calls": 3}, True)],
)
def test_a_function_draws_the_numbers_of_its_code(kwargs, whole):
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


def mapped():
    function = tf.function(lambda x: x + tf.random.uniform([4]), autograph=False)
    return tf.map_fn(function, tf.zeros([3, 4]))


@pytest.mark.parametrize("draw", [looped, nested, around, mapped])
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
