"""Scores of given texts: the log probability of every token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.decoding.choice import check_ids, check_numbers
from pipemesh.errors import DecodingError


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A text and its log probabilities.

    Attributes:
        number: the text's number, from 0 on.
        tokens: the ids of all tokens but the first, which has no score.
        log_probs: natural logarithm of each token's probability given those before it.

    Example:
        >>> round(ScoredText(0, (5, 7), (-0.5, -1.5)).perplexity, 3)
        2.718
    """

    number: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]

    @property
    def log_prob(self) -> float:
        """Returns the log probability of the whole text."""
        return sum(self.log_probs)

    @property
    def perplexity(self) -> float:
        """Returns the perplexity per token: 1 if the model is certain of all tokens."""
        return exp(-self.log_prob / len(self.tokens))


def exp(value: float) -> float:
    """Returns e to the power of a number; infinity on overflow."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def windows(ids: Sequence[int], length: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yields windows of a text that move by `stride`, with the number of last tokens to count.

    Each token but the first counts once, as in the guide of `transformers` on perplexity.
    """
    # Example: list(windows(range(6), 4, 2)) is [(range(0, 4), 3), (range(2, 6), 2)].
    counted = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        if end > counted:
            yield ids[begin:end], end - counted
        counted = end
        if end == len(ids):
            return


class Scorer:
    """A computation of log probabilities of texts, with several texts per row and rows per batch.

    Args:
        compute: returns negative log probabilities `[rows, length]` of `labels`, for a batch of
            numpy arrays of that shape: `ids`, `labels`, `segment_ids` (from 1; 0 for padding),
            `segment_pos`, all int32, and `weights` (1, or 0 for padding), float32.
        rows: the rows of a batch.
        length: the positions of a row.
        vocab_size: ids must be below it.

    Example:
        >>> def certain(batch):
        ...     return tf.zeros_like(batch["weights"])
        >>> scorer = Scorer(certain, rows=1, length=4, vocab_size=9)
        >>> [scored.tokens for scored in scorer.score([[1, 2], [1, 3, 4]])]
        [(2,), (3, 4)]
    """

    def __init__(
        self,
        compute: Callable[[dict[str, Any]], tf.Tensor],
        *,
        rows: int,
        length: int,
        vocab_size: int,
    ) -> None:
        self._compute, self._vocab_size = compute, vocab_size
        self._shape = (rows, length)

    def check(self, text: Sequence[int], number: int = 0) -> None:
        """Checks that a text, given as ids, can be scored.

        Raises:
            DecodingError: the text is too short or too long, or an id is not in the vocabulary. The
                error names the text by `number`.
        """
        length = self._shape[1]
        if len(text) < 2:
            raise DecodingError(
                f"text {number} has {len(text)} tokens; give 2 or more, the first is not scored"
            )
        if len(text) > length + 1:
            raise DecodingError(
                f"text {number} has {len(text) - 1} tokens to be scored, which exceeds the "
                f"model's {length}; give a shorter one, or cut it"
            )
        check_ids(f"text {number}", text, self._vocab_size)

    def score(self, texts: Iterable[Sequence[int]]) -> Iterator[ScoredText]:
        """Scores texts, in their order.

        Args:
            texts: the ids of each; the first id is not scored.

        Yields:
            A `ScoredText` for each text.

        Raises:
            DecodingError: a text cannot be scored, or logits are NaN; earlier texts may be scored.
        """
        batch = _Batch(self._shape)
        for number, text in enumerate(texts):
            self.check(text, number)
            if not batch.add(number, text):
                yield from self._scored(batch)
                batch = _Batch(self._shape)
                batch.add(number, text)
        if batch.texts:
            yield from self._scored(batch)

    def _scored(self, batch: _Batch) -> Iterator[ScoredText]:
        losses = np.asarray(self._compute(batch.arrays))
        for number, row, begin, text in batch.texts:
            log_probs = -losses[row, begin : begin + len(text) - 1]
            check_numbers(log_probs)
            yield ScoredText(number, tuple(text[1:]), tuple(map(float, log_probs)))


class _Batch:
    """Rows that are filled with texts, one after the other."""

    def __init__(self, shape: tuple[int, int]) -> None:
        names = ("ids", "labels", "segment_ids", "segment_pos")
        self.arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
        self.arrays["weights"] = np.zeros(shape, np.float32)
        # Number, row, position in it, and ids.
        self.texts: list[tuple[int, int, int, list[int]]] = []
        self._shape, self._row, self._used = shape, 0, 0

    def add(self, number: int, text: Sequence[int]) -> bool:
        """Adds a text that fits into a row; returns whether there was room."""
        count = len(text) - 1
        if self._used + count > self._shape[1]:
            self._row, self._used = self._row + 1, 0
        if self._row == self._shape[0]:
            return False
        begin, end = self._used, self._used + count
        segment = self.arrays["segment_ids"][self._row].max() + 1
        values = {
            "ids": text[:-1],
            "labels": text[1:],
            "segment_ids": segment,
            "segment_pos": range(count),
            "weights": 1.0,
        }
        for name, value in values.items():
            self.arrays[name][self._row, begin:end] = value
        self.texts.append((number, self._row, begin, list(text)))
        self._used = end
        return True
