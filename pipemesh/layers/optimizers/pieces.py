"""A tensor in pieces, and its means: only sums along a dim travel between devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import sum_in_order

# For each dim of the whole tensor where a piece begins.
Begin = tuple[int, ...]


class Piece(NamedTuple):
    """A part of a tensor.

    Attributes:
        beside: the variable on whose device it lies, the slice of a weight.
        value: tensor or variable.
    """

    beside: tf.Variable
    value: Any


class Pieces:
    """A tensor that lies in pieces, on a grid.

    Args:
        whole: its sizes.
        parts: its pieces, by where they begin.

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
        """What lies in each piece."""
        return [part.value for part in self.parts.values()]

    def map(self, function: Callable[..., Any], *others: Pieces) -> Pieces:
        """Computes each piece of something of the same sizes where this one has it.

        Args:
            function: takes a piece of this tensor and one of each of the others.
            others: tensors in pieces that begin where those of this one do.
        """
        found = {}
        for begin, (beside, value) in self.parts.items():
            with tf.device(beside.device):
                given = [other.parts[begin].value for other in others]
                found[begin] = Piece(beside, function(value, *given))
        return Pieces(self.whole, found)

    def without(self, axis: int) -> Pieces:
        """The first pieces along a dim: beside them lies what the others share."""
        found: dict[Begin, Piece] = {}
        for begin, part in self.parts.items():
            found.setdefault(_without(begin, axis), part)
        return Pieces(_without(self.whole, axis), found)

    def mean(self, axis: int) -> Pieces:
        """Averages along a dim, which is gone then: each piece sends a sum to the first of its row.

        Args:
            axis: the number of the dim.
        """
        sums: dict[Begin, list[tf.Tensor]] = {}
        for begin, part in self.map(lambda value: tf.reduce_sum(value, axis)).parts.items():
            sums.setdefault(_without(begin, axis), []).append(part.value)
        first = self.without(axis)
        own = {begin: Piece(first.parts[begin].beside, sums[begin]) for begin in sums}
        return Pieces(first.whole, own).map(lambda parts: sum_in_order(parts) / self.whole[axis])

    def spread(self, like: Pieces, axis: int) -> Pieces:
        """Gives each piece of a tensor what it shares with others along a dim, of size 1 now.

        Args:
            like: the tensor that has the dim.
            axis: the number of the dim.
        """
        shared = {begin: self.parts[_without(begin, axis)] for begin in like.parts}
        return like.map(lambda _, part: tf.expand_dims(part, axis), Pieces(like.whole, shared))

    def root_mean_square(self) -> tf.Tensor:
        """Of all elements, a scalar on the first piece's device."""
        squares = self.map(lambda value: tf.reduce_sum(tf.square(value))).values
        with self._beside_first():
            return tf.sqrt(sum_in_order(squares) / math.prod(self.whole))

    def is_finite(self) -> tf.Tensor:
        """Whether all elements are finite, a scalar on the first piece's device."""
        known = self.map(lambda value: tf.reduce_all(tf.math.is_finite(value))).values
        with self._beside_first():
            return tf.reduce_all(tf.stack(known))

    def _beside_first(self) -> Any:
        return tf.device(next(iter(self.parts.values())).beside.device)


def _without(numbers: Any, axis: int) -> Any:
    return numbers[:axis] + numbers[axis + 1 :]
