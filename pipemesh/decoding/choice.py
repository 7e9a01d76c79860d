"""Choosing tokens: a chooser that takes or draws the next token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.decoding_limits import check_sampling
from pipemesh.errors import DecodingError


class Choice(NamedTuple):
    """The next tokens of the rows of a group."""

    # `ids` and `parents` are `[rows]` int32. A parent is the row that a row continues; None if each
    # row continues itself. `state` is for the next choice, `results` are for `take` of rows; the
    # first dim of each is rows or prompts.

    ids: tf.Tensor
    parents: tf.Tensor | None
    state: tf.Tensor
    results: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt.

    Attributes:
        number: the prompt's number, from 0 on.
        tokens: ids, including the stop token that ended it.
        log_probs: natural logarithm of the model's probability of each token.
        stopped: whether a stop token ended it; otherwise it has the requested number of tokens.
        others: the other results of a beam search, best first.

    Example:
        >>> Continuation(0, tokens=(5, 7), log_probs=(-0.5, -1.5), stopped=False).tokens
        (5, 7)
    """

    number: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stopped: bool
    others: tuple[Continuation, ...] = ()


def check_ids(where: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises a DecodingError if an id is not in the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise DecodingError(
                f"{where} has the token {token}; ids are from 0 to {vocab_size - 1}"
            )


def check_numbers(log_probs: Any) -> None:
    """Raises a DecodingError if a log probability is NaN."""
    # It is NaN if any logit of its row was NaN or infinite. Minus infinity is valid: an impossible
    # token.
    if np.isnan(log_probs).any():
        raise DecodingError(
            "logits are not numbers (NaN): weights are damaged, or too large for the dtype; use "
            "another checkpoint, or --compute_dtype=float32"
        )


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A chooser that takes the most likely next token, or draws one.

    Attributes:
        temperature: the divisor of logits; 0 for the most likely token (greedy).
        top_k: the number of most likely tokens to draw from; 0 for all.
        top_p: the total probability of the most likely tokens to draw from, one token at least
            (Holtzman et al., "The curious case of neural text degeneration", 2020).

    Raises:
        DecodingError: a value is invalid.

    Example:
        >>> logits = tf.math.log([[0.1, 0.6, 0.3]])
        >>> ids, log_probs = Sampler().drawn(logits, tf.constant([[0, 0]]))
        >>> ids.numpy().tolist(), tf.exp(log_probs).numpy().round(2).tolist()
        ([1], [0.6000000238418579])
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)

    @property
    def width(self) -> int:
        """Returns the number of rows of a prompt, which is 1."""
        return 1

    @property
    def result_types(self) -> tuple[tf.DType, ...]:
        """Returns the types of a token and its log probability."""
        return tf.int32, tf.float32

    def check(self, vocab_size: int, stop: Collection[int]) -> None:
        """Accepts any vocabulary."""

    def row(self, number: int, most: int, stop: Collection[int]) -> Sampled:
        """Returns a prompt that gets `most` tokens unless one of `stop` ends it."""
        return Sampled(number, most, stop)

    def begin(self, logits: tf.Tensor, seeds: tf.Tensor, stop: Collection[int]) -> Choice:
        """Chooses the first tokens like all others."""
        return self.choose(logits, seeds, stop)

    def choose(self, logits: tf.Tensor, state: tf.Tensor, stop: Collection[int]) -> Choice:
        """Chooses the next tokens, and returns seeds for those after them; see `drawn`."""
        ids, log_probs = self.drawn(logits, state)
        return Choice(ids, None, state + tf.constant([0, 1]), (ids, log_probs))

    def drawn(self, logits: tf.Tensor, seeds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Chooses a token for each row.

        Args:
            logits: `[rows, vocab]` float32.
            seeds: `[rows, 2]` int32; equal seeds draw equal numbers in any row.

        Returns:
            The ids, `[rows]` int32, and their log probabilities under the model, `[rows]` float32,
            independent of temperature, `top_k` and `top_p`.
        """
        log_probs = tf.nn.log_softmax(logits)
        if self.temperature:
            ids = self._draw(logits / self.temperature, seeds)
        else:
            ids = tf.argmax(logits, -1, tf.int32)
        return ids, tf.gather(log_probs, ids, batch_dims=1)

    def _draw(self, logits: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        vocab = static_sizes(logits)[1]
        values, ids = tf.math.top_k(logits, min(self.top_k or vocab, vocab))
        chances = tf.nn.softmax(values)
        before = tf.cumsum(chances, -1, exclusive=True)
        chances = tf.where(before < self.top_p, chances, 0.0)
        ends = tf.cumsum(chances, -1)
        drawn = tf.map_fn(
            lambda seed: tf.random.stateless_uniform([], seed),
            seeds,
            fn_output_signature=tf.float32,
        )
        # Rounding may put the number beyond the last token.
        most = tf.math.count_nonzero(chances, -1, dtype=tf.int32) - 1
        reached = drawn[:, None] * ends[:, -1:]
        index = tf.reduce_sum(tf.cast(ends <= reached, tf.int32), -1)
        return tf.gather(ids, tf.minimum(index, most), batch_dims=1)


class Sampled:
    """A prompt that is continued token by token."""

    def __init__(self, number: int, most: int, stop: Collection[int]) -> None:
        self.number = number
        self._most, self._stop = most, stop
        self._tokens: list[int] = []
        self._log_probs: list[float] = []

    @property
    def left(self) -> int:
        """Returns the number of tokens that may still be added."""
        return self._most - len(self._tokens)

    def take(self, *results: Any) -> Continuation | None:
        """Takes a token and its log probability; returns the continuation if it is complete."""
        token, log_prob = results
        self._tokens.append(int(token))
        self._log_probs.append(float(log_prob))
        stopped = self._tokens[-1] in self._stop
        if not stopped and self.left:
            return None
        return Continuation(self.number, tuple(self._tokens), tuple(self._log_probs), stopped)
