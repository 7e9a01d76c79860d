"""Candidates of sampled softmax, drawn by a key."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope, plan_free_randomness
from tests.randomness.microbatches import whole_and_parts

FREQUENCIES = [5.0, 1.0, 3.0, 0.5]
RUNS = 2000


def unigram(classes, num_true, num_sampled, unique, range_max, **more):
    return tf.random.fixed_unigram_candidate_sampler(
        classes,
        num_true,
        num_sampled,
        unique,
        range_max,
        unigrams=FREQUENCIES,
        num_reserved_ids=1,
        distortion=0.7,
        **more,
    )


SAMPLERS = {
    "uniform": tf.random.uniform_candidate_sampler,
    "log_uniform": tf.random.log_uniform_candidate_sampler,
    "unigram": unigram,
}


@pytest.mark.parametrize(
    ("name", "unique"),
    [("uniform", False), ("log_uniform", True), ("unigram", True), ("unigram", False)],
)
def test_classes_and_counts_equal_tensorflows(name, unique):
    """Compares means over many draws, within their standard errors."""
    classes = tf.constant([[1], [4]], tf.int64)

    def means(number):
        found = SAMPLERS[name](classes, 1, 3, unique, 5)
        sampled = tf.reduce_sum(tf.one_hot(found[0], 5), 0)
        counts = tf.scatter_nd(found[0][:, None], found[2], [5])
        return tf.concat([sampled, found[1][:, 0], counts * sampled], 0)

    @tf.function
    def theirs():
        return tf.map_fn(means, tf.range(RUNS, dtype=tf.int64), fn_output_signature=tf.float32)

    @tf.function
    def ours():
        with plan_free_randomness(tf.constant(7, tf.int64)), layer_scope("layer"):
            return tf.map_fn(means, tf.range(RUNS, dtype=tf.int64), fn_output_signature=tf.float32)

    wanted, found = theirs().numpy(), ours().numpy()
    error = np.sqrt((wanted.var(0) + found.var(0)) / RUNS) + 1e-6
    np.testing.assert_array_less(np.abs(wanted.mean(0) - found.mean(0)), 5 * error)
    if unique:
        assert (found[:, :5] <= 1).all()


def test_microbatches_have_the_candidates_of_the_whole_batch():
    def draw(shape):
        classes = tf.zeros([shape[0], 1], tf.int64)
        return tf.random.log_uniform_candidate_sampler(classes, 1, 4, True, 50)[0]

    whole, parts = whole_and_parts(draw, [6], [2], 3)
    for part in parts:
        np.testing.assert_array_equal(part, whole)


def test_they_differ_by_step_and_by_the_seed_given():
    def draw(step, seed=None):
        with plan_free_randomness(tf.constant(step, tf.int64)), layer_scope("layer"):
            classes = tf.zeros([1, 1], tf.int64)
            found = tf.random.uniform_candidate_sampler(classes, 1, 5, True, 1000, seed=seed)
        return found.sampled_candidates.numpy().tolist()

    assert draw(3) == draw(3)
    assert len({*map(tuple, (draw(3), draw(4), draw(3, seed=9)))}) == 3


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (tf.random.learned_unigram_candidate_sampler, "learns what to sample from each call"),
        (lambda *a: unigram(*a[:-1], 9), "range_max=9, but 1 reserved classes and 4 frequencies"),
        (lambda *a: unigram(*a, num_shards=2), "num_shards=2"),
    ],
)
def test_samplers_that_cannot_be_repeated_are_refused(call, told):
    with plan_free_randomness(tf.constant(0, tf.int64)), layer_scope("layer"):
        with pytest.raises(PipelineError, match=told):
            call(tf.zeros([1, 1], tf.int64), 1, 2, True, 5)
