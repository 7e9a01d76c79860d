"""Candidates of sampled softmax, drawn by a key from the distributions of TensorFlow's samplers.

TensorFlow's samplers are stateful and draw one class after the other until they have enough
different ones. Here each class draws the time of its first occurrence, an exponential variable with
the class's probability as rate: their order is that of a sample without replacement (Efraimidis and
Spirakis, "Weighted random sampling with a reservoir", 2006). The number of repetitions in between
is drawn afterwards, since expected counts depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipelineError


class Candidates(NamedTuple):
    """The results of TensorFlow's samplers: classes, and expected counts."""

    # int64 `[num_sampled]`.
    sampled_candidates: tf.Tensor
    # float32.
    true_expected_count: tf.Tensor
    sampled_expected_count: tf.Tensor


# Draws float64 numbers of a shape, in [0, 1).
Uniform = Callable[[Sequence[int]], tf.Tensor]


def candidates(
    weights: tf.Tensor, true_classes: Any, num_sampled: int, unique: bool, uniform: Uniform
) -> Candidates:
    """Samples classes."""
    # `weights` (float64) are proportional to the probabilities of classes, `true_classes` get
    # expected counts, `unique` samples are different from each other, and `uniform` draws the
    # numbers.
    shares = weights / tf.reduce_sum(weights)
    tries = tf.constant(num_sampled, tf.float64)
    if unique:
        size: Any = shares.shape[0]
        numbers = uniform([size + num_sampled])
        times = -tf.math.log1p(-numbers[:size]) / shares
        times = tf.where(shares > 0, times, np.inf)
        sampled = tf.math.top_k(-times, num_sampled).indices
        chosen = tf.gather(shares, sampled)
        # The probability that a draw is a new class; at least that of the class that was drawn.
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
    """Returns weights of equally probable classes."""
    return tf.ones([range_max], tf.float64)


def log_uniform_weights(range_max: int) -> tf.Tensor:
    """Returns weights of classes in the order of their frequency, by Zipf's law."""
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
    """Returns weights of classes with known frequencies, from a list or a file."""
    # The file has a line for each class, with the frequency after the last comma. The first
    # `num_reserved_ids` classes are never sampled. Frequencies are raised to the power
    # `distortion`.
    if (num_shards, shard) != (1, 0):
        raise PipelineError(
            f"fixed_unigram_candidate_sampler has num_shards={num_shards} and shard={shard}, "
            "but sampling from a shard of the classes is not supported; give num_shards=1"
        )
    frequencies: Sequence[float] = unigrams
    if vocab_file:
        with tf.io.gfile.GFile(vocab_file) as file:
            frequencies = [float(line.rsplit(",", 1)[-1]) for line in file if line.strip()]
    if num_reserved_ids + len(frequencies) != range_max:
        raise PipelineError(
            f"fixed_unigram_candidate_sampler has range_max={range_max}, but {num_reserved_ids} "
            f"reserved classes and {len(frequencies)} frequencies; give one for each class"
        )
    powers = np.power(np.asarray(frequencies, np.float64), distortion)
    return tf.constant(np.concatenate([np.zeros(num_reserved_ids), powers]))
