"""Dispatchers in front of TensorFlow's random operations."""

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


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rest", [(4,), (3,), (5, 7)])
def test_every_kind_of_draw(name, rest):
    whole, parts = whole_and_parts(DRAWS[name], [6, *rest], [2, *rest], 3)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole)) > 1


def test_the_whole_batch_draws_tensorflows_numbers():
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


def test_draws_in_a_scope_do_not_count_outside_seeds():
    tf.random.set_seed(1)
    expected = [tf.random.uniform([4]).numpy().tolist() for _ in range(2)]
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
