"""The interface of the ways to choose tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from pipemesh.errors import DecodingError


class Choice(NamedTuple):
    """The next tokens of the rows of a group."""

    # `ids` and `parents` are `[rows]` int32. A parent is the row that a row continues; None if each
    # row continues itself. `state` is for the next choice, `results` are for `Row.take`; the first
    # dim of each is rows or prompts.

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


class Row(Protocol):
    """A prompt that a chooser continues."""

    number: int

    @property
    def left(self) -> int:
        """Returns the number of tokens that may still be added."""
        ...

    def take(self, *results: Any) -> Continuation | None:
        """Takes the results of a step; returns the continuation if it is complete."""
        ...


class Chooser(Protocol):
    """The interface of a way to choose tokens."""

    @property
    def width(self) -> int:
        """Returns the number of rows of a prompt."""
        ...

    @property
    def result_types(self) -> tuple[tf.DType, ...]:
        """Returns the types of the results that rows take."""
        ...

    def check(self, vocab_size: int, stop: Collection[int]) -> None:
        """Raises a DecodingError if the vocabulary is too small."""
        ...

    def row(self, number: int, most: int, stop: Collection[int]) -> Row:
        """Returns a prompt that gets `most` tokens unless one of `stop` ends it."""
        ...

    def begin(self, logits: tf.Tensor, seeds: tf.Tensor, stop: Collection[int]) -> Choice:
        """Chooses the first tokens from `[prompts, vocab]`, for `prompts * width` rows."""
        ...

    def choose(self, logits: tf.Tensor, state: tf.Tensor, stop: Collection[int]) -> Choice:
        """Chooses the next tokens of `[rows, vocab]`."""
        ...


def check_numbers(log_probs: Any) -> None:
    """Raises a DecodingError if a log probability is NaN."""
    # It is NaN if any logit of its row was NaN or infinite. Minus infinity is valid: an impossible
    # token.
    if np.isnan(log_probs).any():
        raise DecodingError(
            "logits are not numbers (NaN): weights are damaged, or too large for the dtype; use "
            "another checkpoint, or --compute_dtype=float32"
        )
