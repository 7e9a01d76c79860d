"""Which tokens are drawn, and how often."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.decoding import Sampler
from pipemesh.errors import DecodingError

CHANCES = np.array([0.05, 0.4, 0.2, 0.3, 0.05], np.float32)
NUMBER = 4000


def shares(**options):
    """Returns the share of each token among the draws."""
    logits = tf.tile([tf.math.log(CHANCES)], [NUMBER, 1])
    seeds = tf.stack([tf.range(NUMBER), tf.ones([NUMBER], tf.int32)], -1)
    ids, log_probs = tf.function(Sampler(**options).drawn)(logits, seeds)
    np.testing.assert_allclose(tf.exp(log_probs), CHANCES[ids.numpy()], rtol=1e-5)
    return np.bincount(ids.numpy(), minlength=5) / NUMBER


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0}, CHANCES),
        ({"temperature": 0.5}, CHANCES**2 / np.sum(CHANCES**2)),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        # 0.4 and 0.3 are less than 0.75, with 0.2 they are more.
        ({"temperature": 1.0, "top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_k": 99}, CHANCES),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(options, wanted):
    np.testing.assert_allclose(shares(**options), wanted, atol=0.03)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "top_k": 2, "top_p": 0.7}])
def test_logits_that_are_not_numbers_have_no_log_probs(options):
    logits = tf.constant([[0.0, np.nan, 1.0], [np.nan] * 3])
    _, log_probs = Sampler(**options).drawn(logits, tf.zeros([2, 2], tf.int32))
    assert np.isnan(log_probs).all()


def test_a_seed_draws_the_same_wherever_its_row_is():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=[6, 9]).astype(np.float32)
    seeds = rng.integers(0, 99, size=[6, 2]).astype(np.int32)
    sampler = Sampler(temperature=1.0)
    ids, _ = sampler.drawn(tf.constant(logits), tf.constant(seeds))
    order = rng.permutation(6)
    again, _ = sampler.drawn(tf.constant(logits[order]), tf.constant(seeds[order]))
    np.testing.assert_array_equal(again, ids.numpy()[order])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature is -1.0; give 0 .greedy., or 1e-06 or more"),
        ({"temperature": 1e-40}, "or 1e-06 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0; give a probability"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 3}, "are for drawing; give a temperature above 0"),
    ],
)
def test_invalid_settings_are_one_line(options, message):
    with pytest.raises(DecodingError, match=message):
        Sampler(**options)
