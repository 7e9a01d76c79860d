"""Beam search: the likeliest continuations as a whole, not token by token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.decoding.choice import Choice, Continuation
from pipemesh.decoding_limits import check_beams
from pipemesh.errors import DecodingError


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Keeps the likeliest beginnings of continuations, and takes the best that is found.

    With one beam the tokens are those of greedy decoding. What ends with a stop token counts if it
    is among the likeliest `beams` when it ends; the search is over when nothing that is under way
    can become better than the worst of so many, or when all tokens that were asked for are there.

    Attributes:
        beams: how many beginnings are kept, at least 1.
        length_penalty: a continuation of `n` tokens has the sum of its log probabilities divided by
            `n ** length_penalty`; 0 takes the likeliest, more prefers longer ones.

    Raises:
        DecodingError: a value cannot be had.

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
        """Rows of a prompt: one a beam."""
        return self.beams

    @property
    def told(self) -> tuple[tf.DType, ...]:
        """Types of the likeliest tokens, what each continues, and their scores."""
        return tf.int32, tf.int32, tf.float32

    def check(self, vocab_size: int, stop: Collection[int]) -> None:
        """Checks that there are tokens enough for all beams.

        Raises:
            DecodingError: there are not.
        """
        if self._looked_at(stop) > vocab_size:
            raise DecodingError(
                f"{self.beams} beams look at {self._looked_at(stop)} tokens, but there are "
                f"{vocab_size}; give {max(vocab_size // (1 + len(stop)), 1)} at most"
            )

    def row(self, number: int, most: int, stop: Collection[int]) -> Beams:
        """A prompt that gets `most` tokens unless one of `stop` ends it."""
        return Beams(self, number, most, stop)

    def begin(self, logits: tf.Tensor, seeds: tf.Tensor, stop: Collection[int]) -> Choice:
        """The likeliest first tokens of each prompt; seeds play no part."""
        return self._choose(logits, tf.zeros([static_sizes(logits)[0]]), 1, stop)

    def choose(self, logits: tf.Tensor, state: tf.Tensor, stop: Collection[int]) -> Choice:
        """The likeliest tokens behind what is kept of each prompt, whose scores are given."""
        return self._choose(logits, state, self.beams, stop)

    def _looked_at(self, stop: Collection[int]) -> int:
        """Each of the likeliest may be followed by any stop token, which keeps no beam."""
        return self.beams * (1 + len(stop))

    def _choose(
        self, logits: tf.Tensor, scores: tf.Tensor, kept: int, stop: Collection[int]
    ) -> Choice:
        rows, vocab = static_sizes(logits)
        prompts = rows // kept
        totals = scores[:, None] + tf.nn.log_softmax(logits)
        totals = tf.reshape(totals, [prompts, kept * vocab])
        best, at = tf.math.top_k(totals, self._looked_at(stop))
        # One of them may be hidden behind those of other beams.
        wrong = tf.reduce_any(tf.math.is_nan(totals), -1, keepdims=True)
        best = tf.where(wrong, float("nan"), best)
        tokens, parents = at % vocab, at // vocab
        ends = tf.zeros_like(tokens)
        for each in sorted(stop):
            ends += tf.cast(tokens == each, tf.int32)
        going = tf.argsort(ends, stable=True)[:, : self.beams]
        first_rows = kept * tf.range(prompts)[:, None]

        def of_going(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.gather(values, going, batch_dims=1), [-1])

        return Choice(
            of_going(tokens),
            of_going(parents + first_rows),
            of_going(best),
            (tokens, parents, best),
        )


class _Found(NamedTuple):
    """A beginning, or a whole continuation."""

    tokens: tuple[int, ...]
    totals: tuple[float, ...]

    def then(self, token: int, total: float) -> _Found:
        return _Found((*self.tokens, token), (*self.totals, total))


class Beams:
    """A prompt that is continued by several beams.

    Args:
        search: what is kept.
        number: of the prompt.
        most: tokens to add.
        stop: ids that end it before.
    """

    def __init__(self, search: BeamSearch, number: int, most: int, stop: Collection[int]) -> None:
        self.number = number
        self._search, self._most, self._stop = search, most, frozenset(stop)
        self._going = [_Found((), ())]
        self._ended: list[tuple[float, _Found]] = []

    @property
    def left(self) -> int:
        """Tokens that may still be added."""
        return self._most - len(self._going[0].tokens)

    def take(self, *told: Any) -> Continuation | None:
        """Takes the likeliest tokens, what each continues, and scores, best first.

        Returns:
            The continuation, if it is done.
        """
        tokens, parents, totals = told
        beams, going = self._search.beams, []
        for place, (token, parent, total) in enumerate(zip(tokens, parents, totals, strict=True)):
            found = self._going[int(parent)].then(int(token), float(total))
            if found.tokens[-1] not in self._stop:
                going.append(found)
            elif place < beams:
                self._end(found)
        self._going = going[:beams]
        if self.left and not self._is_over():
            return None
        for found in () if self.left else self._going:
            self._end(found)
        best, *others = (self._told(found) for _, found in self._ended[:beams])
        return dataclasses.replace(best, others=tuple(others))

    def _score(self, total: float, length: int) -> float:
        # As a power it might be more than a float can be.
        return total * math.exp(-self._search.length_penalty * math.log(length))

    def _end(self, found: _Found) -> None:
        self._ended.append((self._score(found.totals[-1], len(found.tokens)), found))
        # Stable, so what was found first stays in front.
        self._ended.sort(key=lambda each: -each[0])

    def _is_over(self) -> bool:
        beams = self._search.beams
        if len(self._ended) < beams:
            return False
        if beams == 1:
            # Greedy: it ends with the likeliest token.
            return True
        # Totals only fall, and the longest divides by the most.
        hope = self._score(self._going[0].totals[-1], self._most)
        return self._ended[beams - 1][0] >= hope

    def _told(self, found: _Found) -> Continuation:
        before = (0.0, *found.totals)
        log_probs = tuple(b - a for a, b in zip(before, found.totals, strict=False))
        return Continuation(self.number, found.tokens, log_probs, found.tokens[-1] in self._stop)
