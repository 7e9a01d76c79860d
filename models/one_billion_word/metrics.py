"""Metrics: a score for every model that predicts text, with any vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.decoding.scorer import exp
from pipemesh.text import short
from pipemesh.training.subject import ratio

from .vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of predictions for some text.

    Scores of parts of a text add up to the score of the whole.

    Attributes:
        nats: summed negative log likelihood.
        tokens: number of predicted tokens, including the ends of sentences.
        words: number of predicted words plus number of sentences.
        bytes: UTF-8 bytes of the text, including a newline after each sentence.

    Example:
        >>> score = Score(nats=20.0, tokens=10, words=5, bytes=40)
        >>> round((score + score).bits_per_byte, 3)
        0.721
    """

    nats: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0

    @property
    def bits_per_byte(self) -> float:
        """Returns the bits that an ideal coder needs for a byte of the text."""
        return bits_per_byte(self.nats, self.bytes)

    @property
    def token_perplexity(self) -> float:
        """Returns the perplexity per token, comparable only under the same vocabulary."""
        return perplexity(self.nats, self.tokens)

    @property
    def word_perplexity(self) -> float:
        """Returns the perplexity per word, as the one-billion-word benchmark reports it."""
        return perplexity(self.nats, self.words)

    @property
    def amount(self) -> int:
        """Returns the number of tokens."""
        return self.tokens

    @property
    def judged(self) -> float:
        """Returns bits per byte, independent of the vocabulary; without text, the nats."""
        return self.bits_per_byte if self.bytes else self.nats

    def values(self) -> dict[str, float]:
        """Returns the values for summaries."""
        return {
            "loss": ratio(self.nats, self.tokens),
            "bits_per_byte": self.bits_per_byte,
            "token_perplexity": self.token_perplexity,
            "word_perplexity": self.word_perplexity,
        }

    def short(self) -> str:
        """Returns short text for the progress line."""
        return f"word ppl {_short(self.word_perplexity)}"

    def __str__(self) -> str:
        return (
            f"{self.bits_per_byte:.3f} bits/byte, perplexity {_short(self.token_perplexity)} a "
            f"token and {_short(self.word_perplexity)} a word"
        )

    def __add__(self, other: Score) -> Score:
        return Score(
            self.nats + other.nats,
            self.tokens + other.tokens,
            self.words + other.words,
            self.bytes + other.bytes,
        )


def sums(nats: Any, labels: Any, weights: Any, vocabulary: Vocabulary) -> dict[str, tf.Tensor]:
    """Returns the attributes of a batch's `Score` as scalars, float64 and int64.

    `nats` are the negative log likelihoods of `labels`. `weights` are 1 for tokens, and 0 for
    padding, whose nats may be anything.
    """
    real = tf.greater(weights, 0)

    def summed(values: Any, dtype: tf.DType) -> tf.Tensor:
        return tf.reduce_sum(tf.where(real, tf.cast(values, dtype), tf.zeros([], dtype)))

    return {
        "nats": summed(nats, tf.float64),
        "tokens": summed(real, tf.int64),
        "words": summed(tf.gather(vocabulary.piece_words, labels), tf.int64),
        "bytes": summed(tf.gather(vocabulary.piece_bytes, labels), tf.int64),
    }


def score(
    nats: np.ndarray, labels: np.ndarray, weights: np.ndarray, vocabulary: Vocabulary
) -> Score:
    """Scores a batch, as `sums`."""
    return score_of(sums(nats, labels, weights, vocabulary))


def score_of(values: Mapping[str, Any]) -> Score:
    """Returns the score with these `sums`."""
    nats, *counts = (values[field.name] for field in dataclasses.fields(Score))
    return Score(float(nats), *map(int, counts))


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Returns the bits per byte of `nats` spent on `num_bytes` bytes; NaN for no bytes."""
    return ratio(nats / math.log(2), num_bytes)


def perplexity(nats: float, count: float) -> float:
    """Returns e to the nats per item; infinity on overflow, NaN for no items."""
    return exp(ratio(nats, count))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.1f}" if value < 1e4 else short(value)
