"""What a way to choose tokens gives the loop, and what it needs to know of a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from pipemesh.errors import DecodingError


class Choice(NamedTuple):
    """The next tokens of the rows of a group.

    Attributes:
        ids: `[rows]` int32.
        parents: `[rows]` int32, the row that each continues; None if each continues itself.
        state: what is needed for the next choice, a tensor with rows in front.
        told: what a `Row` is told, each with prompts in front.
    """

    ids: tf.Tensor
    parents: tf.Tensor | None
    state: tf.Tensor
    told: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What follows a prompt.

    Attributes:
        number: of the prompt, from 0 on.
        tokens: ids, the one that ended it among them.
        log_probs: of each under the model, natural logarithms.
        stopped: whether one of the stop tokens ended it; else it has as many as were asked for.
        others: of a search, what was found besides, the best first.
    """

    number: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    stopped: bool
    others: tuple[Continuation, ...] = ()


class Row(Protocol):
    """A prompt that is being continued.

    Attributes:
        number: of the prompt.
        left: tokens that may still be added.
    """

    number: int

    @property
    def left(self) -> int:
        """Tokens that may still be added."""
        ...

    def take(self, *told: Any) -> Continuation | None:
        """Takes what was told of a token; returns the continuation if it is done."""
        ...


class Chooser(Protocol):
    """A way to choose tokens.

    Attributes:
        width: rows of a prompt.
        told: types of what rows are told.
    """

    @property
    def width(self) -> int:
        """Rows of a prompt."""
        ...

    @property
    def told(self) -> tuple[tf.DType, ...]:
        """Types of what rows are told."""
        ...

    def check(self, vocab_size: int, stop: Collection[int]) -> None:
        """Checks that it can be had.

        Raises:
            DecodingError: it cannot.
        """
        ...

    def row(self, number: int, most: int, stop: Collection[int]) -> Row:
        """A prompt that gets `most` tokens unless one of `stop` ends it."""
        ...

    def begin(self, logits: tf.Tensor, seeds: tf.Tensor, stop: Collection[int]) -> Choice:
        """The first tokens: of `[prompts, vocab]`, for `prompts * width` rows."""
        ...

    def choose(self, logits: tf.Tensor, state: tf.Tensor, stop: Collection[int]) -> Choice:
        """The next tokens: of `[rows, vocab]`, for as many."""
        ...


def check_numbers(log_probs: Any) -> None:
    """Checks log probabilities, which are NaN if any logit of their row was NaN or infinite.

    Args:
        log_probs: any shape.

    Raises:
        DecodingError: one is NaN. Minus infinity is a number: an impossible token has it.
    """
    if np.isnan(log_probs).any():
        raise DecodingError(
            "logits are not numbers (NaN): weights are damaged, or too large for the dtype; take "
            "another checkpoint, or --compute_dtype=float32"
        )
