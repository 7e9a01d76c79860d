"""A tensor in pieces, and its means: only sums along a dim move between devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import sum_in_order

# The start of a piece in each dim of the whole tensor.
Begin = tuple[int, ...]


class Piece(NamedTuple):
    """A piece of a tensor.

    Attributes:
        beside: the slice of a weight on whose device the piece is.
        value: the tensor or variable.
    """

    beside: tf.Variable
    value: Any


class Pieces:
    """A tensor in pieces on a grid, by the starts of the pieces.

    Example:
        >>> halves = {(0, 2 * i): tf.Variable([[1.0 + i, 5.0 + i]]) for i in range(2)}
        >>> weight = Pieces([1, 4], {begin: Piece(v, v) for begin, v in halves.items()})
        >>> rows = weight.mean(1)
        >>> [(begin, part.value.numpy().tolist()) for begin, part in rows.parts.items()]
        [((0,), [3.5])]
        >>> spread = rows.spread(weight, 1).parts
        >>> [part.value.numpy().tolist() for part in spread.values()]
        [[[3.5]], [[3.5]]]
    """

    def __init__(self, whole: list[int], parts: Mapping[Begin, Piece]) -> None:
        self.whole, self.parts = whole, dict(parts)

    @property
    def values(self) -> list[Any]:
        """Returns the value of each piece."""
        return [part.value for part in self.parts.values()]

    def map(self, function: Callable[..., Any], *others: Pieces) -> Pieces:
        """Applies a function to each piece, and to those of other tensors with the same grid."""
        found = {}
        for begin, (beside, value) in self.parts.items():
            with tf.device(beside.device):
                given = [other.parts[begin].value for other in others]
                found[begin] = Piece(beside, function(value, *given))
        return Pieces(self.whole, found)

    def without(self, axis: int) -> Pieces:
        """Returns the first pieces along a dim, beside which shared values are kept."""
        found: dict[Begin, Piece] = {}
        for begin, part in self.parts.items():
            found.setdefault(_without(begin, axis), part)
        return Pieces(_without(self.whole, axis), found)

    def mean(self, axis: int) -> Pieces:
        """Averages over a dim and removes it; each piece sends one sum to the first of its row."""
        sums: dict[Begin, list[tf.Tensor]] = {}
        for begin, part in self.map(lambda value: tf.reduce_sum(value, axis)).parts.items():
            sums.setdefault(_without(begin, axis), []).append(part.value)
        first = self.without(axis)
        own = {begin: Piece(first.parts[begin].beside, sums[begin]) for begin in sums}
        return Pieces(first.whole, own).map(lambda parts: sum_in_order(parts) / self.whole[axis])

    def spread(self, like: Pieces, axis: int) -> Pieces:
        """Gives each piece of `like` the value that it shares along a dim, as a dim of size 1."""
        shared = {begin: self.parts[_without(begin, axis)] for begin in like.parts}
        return like.map(lambda _, part: tf.expand_dims(part, axis), Pieces(like.whole, shared))

    def root_mean_square(self) -> tf.Tensor:
        """Returns the root mean square of all elements, a scalar on the first piece's device."""
        squares = self.map(lambda value: tf.reduce_sum(tf.square(value))).values
        with self._beside_first():
            return tf.sqrt(sum_in_order(squares) / math.prod(self.whole))

    def is_finite(self) -> tf.Tensor:
        """Returns whether all elements are finite, a scalar on the first piece's device."""
        known = self.map(lambda value: tf.reduce_all(tf.math.is_finite(value))).values
        with self._beside_first():
            return tf.reduce_all(tf.stack(known))

    def _beside_first(self) -> Any:
        return tf.device(next(iter(self.parts.values())).beside.device)


def _without(numbers: Any, axis: int) -> Any:
    return numbers[:axis] + numbers[axis + 1 :]
