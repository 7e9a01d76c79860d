"""Candidates of sampled softmax, drawn by a key from the distributions that TensorFlow has.

TensorFlow's samplers draw with state, one class after the other until there are enough different
ones. Here all classes draw the time at which they come first, an exponential variable with the
class's probability as its rate: their order is that of a sample without replacement (Efraimidis and
Spirakis, "Weighted random sampling with a reservoir", 2006). How often classes that were there
already came in between is drawn behind, since expected counts depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipelineError


class Candidates(NamedTuple):
    """What TensorFlow's samplers return.

    Attributes:
        sampled_candidates: int64 `[num_sampled]`, classes.
        true_expected_count: float32, how often each of the true classes is expected among them.
        sampled_expected_count: the same of each candidate.
    """

    sampled_candidates: tf.Tensor
    true_expected_count: tf.Tensor
    sampled_expected_count: tf.Tensor


# Draws float64 numbers of a shape, in [0, 1).
Uniform = Callable[[Sequence[int]], tf.Tensor]


def candidates(
    weights: tf.Tensor, true_classes: Any, num_sampled: int, unique: bool, uniform: Uniform
) -> Candidates:
    """Samples classes.

    Args:
        weights: float64, one for each class, in proportion to its probability.
        true_classes: classes whose expected counts are wanted.
        num_sampled: how many to sample.
        unique: whether they are different from each other.
        uniform: draws the numbers.
    """
    shares = weights / tf.reduce_sum(weights)
    tries = tf.constant(num_sampled, tf.float64)
    if unique:
        size: Any = shares.shape[0]
        numbers = uniform([size + num_sampled])
        times = -tf.math.log1p(-numbers[:size]) / shares
        times = tf.where(shares > 0, times, np.inf)
        sampled = tf.math.top_k(-times, num_sampled).indices
        chosen = tf.gather(shares, sampled)
        # Of a draw to be a new class; at least that of the class which came.
        is_new = tf.maximum(1 - tf.cumsum(chosen, exclusive=True), chosen)
        tries += tf.reduce_sum(tf.floor(tf.math.log1p(-numbers[size:]) / tf.math.log1p(-is_new)))
    else:
        ends = tf.cumsum(shares)
        sampled = tf.searchsorted(ends, uniform([num_sampled]) * ends[-1], side="right")

    def expected(classes: tf.Tensor) -> tf.Tensor:
        share = tf.gather(shares, classes)
        among = -tf.math.expm1(tries * tf.math.log1p(-share))
        return tf.cast(tf.where(tries > num_sampled, among, share * num_sampled), tf.float32)

    return Candidates(
        tf.cast(sampled, tf.int64), expected(tf.convert_to_tensor(true_classes)), expected(sampled)
    )


def uniform_weights(range_max: int) -> tf.Tensor:
    """Of classes that are alike."""
    return tf.ones([range_max], tf.float64)


def log_uniform_weights(range_max: int) -> tf.Tensor:
    """Of classes in the order of their frequency, by Zipf's law."""
    return tf.math.log1p(1 / tf.range(1, range_max + 1, dtype=tf.float64))


def unigram_weights(
    range_max: int,
    vocab_file: str = "",
    distortion: float = 1.0,
    num_reserved_ids: int = 0,
    num_shards: int = 1,
    shard: int = 0,
    unigrams: Sequence[float] = (),
) -> tf.Tensor:
    """Of classes whose frequencies are given.

    Args:
        range_max: the number of classes.
        vocab_file: path of a file with a line for each class; what follows its last comma counts.
        distortion: the power that frequencies are raised to.
        num_reserved_ids: the classes before those, which are never sampled.
        num_shards: into how many parts the classes are cut; 1.
        shard: which of them; 0.
        unigrams: the frequencies, in place of a file.

    Raises:
        PipelineError: there are shards, or not as many frequencies as classes.
    """
    if (num_shards, shard) != (1, 0):
        raise PipelineError(
            f"fixed_unigram_candidate_sampler has num_shards={num_shards}, but one part of the "
            "classes is not sampled alone here; give num_shards=1"
        )
    given: Sequence[float] = unigrams
    if vocab_file:
        with tf.io.gfile.GFile(vocab_file) as file:
            given = [float(line.rsplit(",", 1)[-1]) for line in file if line.strip()]
    if num_reserved_ids + len(given) != range_max:
        raise PipelineError(
            f"fixed_unigram_candidate_sampler has range_max={range_max}, but {num_reserved_ids} "
            f"reserved classes and {len(given)} frequencies; give as many as there are classes"
        )
    powers = np.power(np.asarray(given, np.float64), distortion)
    return tf.constant(np.concatenate([np.zeros(num_reserved_ids), powers]))
