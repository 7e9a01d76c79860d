"""Beam search: the most likely continuations as a whole, not token by token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.decoding.choice import Choice, Continuation, Sampler
from pipemesh.decoding_limits import check_beams
from pipemesh.errors import DecodingError


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """A chooser that keeps the most likely prefixes, and returns the best continuation.

    With one beam the tokens are those of greedy decoding. A continuation that ends with a stop
    token counts if it is among the most likely `beams` when it ends. The search ends when no prefix
    can become better than the worst of the `beams` best continuations, or when all requested tokens
    exist.

    Attributes:
        beams: the number of prefixes to keep, at least 1.
        length_penalty: the sum of log probabilities of `n` tokens is divided by
            `n ** length_penalty`. 0 takes the most likely continuation, more prefers longer ones.

    Raises:
        DecodingError: a value is invalid.

    Example:
        >>> search = BeamSearch(beams=2)
        >>> choice = search.begin(tf.math.log([[0.1, 0.6, 0.3]]), tf.zeros([1, 2], tf.int32), ())
        >>> choice.ids.numpy().tolist(), tf.exp(choice.state).numpy().round(1).tolist()
        ([1, 2], [0.6000000238418579, 0.30000001192092896])
    """

    beams: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_beams(self.beams, self.length_penalty)

    @property
    def width(self) -> int:
        """Returns the number of rows of a prompt: one per beam."""
        return self.beams

    @property
    def result_types(self) -> tuple[tf.DType, ...]:
        """Returns the types of the most likely tokens, of their beams, and of their scores."""
        return tf.int32, tf.int32, tf.float32

    def check(self, vocab_size: int, stop: Collection[int]) -> None:
        """Raises a DecodingError if the vocabulary has too few tokens for all beams."""
        if self._looked_at(stop) > vocab_size:
            raise DecodingError(
                f"{self.beams} beams look at {self._looked_at(stop)} tokens, but there are "
                f"{vocab_size}; give {max(vocab_size // (1 + len(stop)), 1)} at most"
            )

    def row(self, number: int, most: int, stop: Collection[int]) -> Beams:
        """Returns a prompt that gets `most` tokens unless one of `stop` ends it."""
        return Beams(self, number, most, stop)

    def begin(self, logits: tf.Tensor, seeds: tf.Tensor, stop: Collection[int]) -> Choice:
        """Chooses the most likely first tokens of each prompt; seeds have no effect."""
        return self._choose(logits, tf.zeros([static_sizes(logits)[0]]), 1, stop)

    def choose(self, logits: tf.Tensor, state: tf.Tensor, stop: Collection[int]) -> Choice:
        """Chooses the most likely tokens after the beams, whose scores are `state`."""
        return self._choose(logits, state, self.beams, stop)

    def _looked_at(self, stop: Collection[int]) -> int:
        """Returns the number of candidates; stop tokens may follow each beam, and keep none."""
        return self.beams * (1 + len(stop))

    def _choose(
        self, logits: tf.Tensor, scores: tf.Tensor, kept: int, stop: Collection[int]
    ) -> Choice:
        rows, vocab = static_sizes(logits)
        prompts = rows // kept
        totals = scores[:, None] + tf.nn.log_softmax(logits)
        totals = tf.reshape(totals, [prompts, kept * vocab])
        best, indices = tf.math.top_k(totals, self._looked_at(stop))
        # A NaN of one beam may be hidden behind scores of other beams.
        is_nan = tf.reduce_any(tf.math.is_nan(totals), -1, keepdims=True)
        best = tf.where(is_nan, float("nan"), best)
        tokens, parents = indices % vocab, indices // vocab
        ends = tf.reduce_any(tokens[..., None] == tf.constant(sorted(stop), tf.int32), -1)
        going = tf.argsort(tf.cast(ends, tf.int32), stable=True)[:, : self.beams]
        first_rows = kept * tf.range(prompts)[:, None]

        def continuing(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.gather(values, going, batch_dims=1), [-1])

        return Choice(
            continuing(tokens),
            continuing(parents + first_rows),
            continuing(best),
            (tokens, parents, best),
        )


# The ways to choose tokens.
Chooser = Sampler | BeamSearch


class _Prefix(NamedTuple):
    """A prefix, or a whole continuation."""

    tokens: tuple[int, ...]
    totals: tuple[float, ...]


class Beams:
    """A prompt that several beams continue."""

    def __init__(self, search: BeamSearch, number: int, most: int, stop: Collection[int]) -> None:
        self.number = number
        self._search, self._most, self._stop = search, most, frozenset(stop)
        self._going = [_Prefix((), ())]
        self._ended: list[tuple[float, _Prefix]] = []

    @property
    def left(self) -> int:
        """Returns the number of tokens that may still be added."""
        return self._most - len(self._going[0].tokens)

    def take(self, *results: Any) -> Continuation | None:
        """Takes tokens, beams and scores, best first; returns a complete continuation."""
        tokens, parents, totals = results
        beams, going = self._search.beams, []
        for place, (token, parent, total) in enumerate(zip(tokens, parents, totals, strict=True)):
            tokens_before, totals_before = self._going[int(parent)]
            prefix = _Prefix((*tokens_before, int(token)), (*totals_before, float(total)))
            if prefix.tokens[-1] not in self._stop:
                going.append(prefix)
            elif place < beams:
                self._end(prefix)
        self._going = going[:beams]
        if self.left and not self._is_over():
            return None
        for prefix in () if self.left else self._going:
            self._end(prefix)
        best, *others = (self._continuation(prefix) for _, prefix in self._ended[:beams])
        return dataclasses.replace(best, others=tuple(others))

    def _score(self, total: float, length: int) -> float:
        # A power might overflow a float.
        return total * math.exp(-self._search.length_penalty * math.log(length))

    def _end(self, prefix: _Prefix) -> None:
        self._ended.append((self._score(prefix.totals[-1], len(prefix.tokens)), prefix))
        # A stable sort: of equal scores the earlier one stays in front.
        self._ended.sort(key=lambda ended: -ended[0])

    def _is_over(self) -> bool:
        beams = self._search.beams
        if len(self._ended) < beams:
            return False
        if beams == 1:
            # Greedy decoding ends with the most likely token.
            return True
        # Totals only fall, and the longest length gives the largest divisor.
        bound = self._score(self._going[0].totals[-1], self._most)
        return self._ended[beams - 1][0] >= bound

    def _continuation(self, prefix: _Prefix) -> Continuation:
        before = (0.0, *prefix.totals)
        log_probs = tuple(b - a for a, b in zip(before, prefix.totals, strict=False))
        return Continuation(self.number, prefix.tokens, log_probs, prefix.tokens[-1] in self._stop)
