"""Weights and gradients in pieces on several devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import sum_in_order
from pipemesh.backend.saved_state import Slice, slice_of
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError

# The start of a piece in each dim of the whole tensor.
Begin = tuple[int, ...]


def weight_name(variable: tf.Variable) -> str:
    """Returns the logical name of the weight of a variable, as `pipemesh checkpoint list` has it
    before `/var`.
    """
    marked = slice_of(variable)
    name = marked[0] if marked else variable.name.removesuffix(":0")
    return name.removesuffix("/var")


class Matrix(NamedTuple):
    """The dims of a weight that are inputs and outputs of a product; others number matrices."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


# An attribute of a variable of a named layer: its matrix, or None if it is none.
_MARK = "_pipemesh_matrix"


def mark_matrix(variable: tf.Variable, matrix: Matrix | None) -> None:
    """Notes on a variable which of its dims make a matrix; None if it is none."""
    setattr(variable, _MARK, matrix)


def is_listed(variable: tf.Variable) -> bool:
    """Returns whether the layer of a variable marked it as a matrix."""
    return getattr(variable, _MARK, None) is not None


def matrix_of(variable: tf.Variable) -> Matrix | None:
    """Returns the matrix of a variable; without a mark those with two dims above 1 are matrices."""
    if hasattr(variable, _MARK):
        return getattr(variable, _MARK)
    marked = slice_of(variable)
    sizes = marked[1].whole if marked else static_sizes(variable)
    return Matrix((0,), (1,)) if len(sizes) == 2 and min(sizes) > 1 else None


class Piece(NamedTuple):
    """A piece of a tensor."""

    beside: tf.Variable  # the slice of a weight on whose device the piece is
    value: Any


class Pieces:
    """A tensor in pieces on a grid, by the starts of the pieces."""

    def __init__(self, whole: list[int], parts: Mapping[Begin, Piece]) -> None:
        self.whole, self.parts = whole, dict(parts)

    @property
    def values(self) -> list[Any]:
        """Returns the value of each piece."""
        return [part.value for part in self.parts.values()]

    def map(self, function: Callable[..., Any], *others: Pieces) -> Pieces:
        """Applies a function to each piece, and to those of other tensors with the same grid."""
        mapped = {}
        for begin, (beside, value) in self.parts.items():
            with tf.device(beside.device):
                values = [other.parts[begin].value for other in others]
                mapped[begin] = Piece(beside, function(value, *values))
        return Pieces(self.whole, mapped)

    def without(self, axis: int) -> Pieces:
        """Returns the first pieces along a dim, beside which shared values are kept."""
        first = {_without(b, axis): part for b, part in self.parts.items() if not b[axis]}
        return Pieces(_without(self.whole, axis), first)

    def mean(self, axis: int) -> Pieces:
        """Averages over a dim and removes it; each piece sends one sum to the first of its row."""
        sums: dict[Begin, list[tf.Tensor]] = {}
        for begin, part in self.map(lambda value: tf.reduce_sum(value, axis)).parts.items():
            sums.setdefault(_without(begin, axis), []).append(part.value)
        first = self.without(axis)
        means = {begin: Piece(first.parts[begin].beside, sums[begin]) for begin in sums}
        return Pieces(first.whole, means).map(lambda parts: sum_in_order(parts) / self.whole[axis])

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


def assign(variables: Pieces, new: Pieces, good: tf.Tensor | None = None) -> list[Any]:
    """Assigns new values, if `good`."""

    def assign(variable: tf.Variable, value: tf.Tensor) -> Any:
        return variable.assign(value if good is None else tf.where(good, value, variable))

    return variables.map(assign, new).values


class OnWholeWeights(tf.compat.v1.train.Optimizer):
    """An optimizer that updates some weights when the gradients of all slices are there.

    These arrive one by one. Other weights are updated by the next class in the order of bases.
    """

    def _takes_whole(self, variable: tf.Variable) -> bool:
        raise NotImplementedError

    def _update(self, name: str, weight: Pieces, grads: Pieces) -> list[Any]:
        """Returns the operations that update a weight and its state."""
        raise NotImplementedError

    def _prepare(self) -> None:
        super()._prepare()
        self._gradients: dict[str, tuple[tf.Variable, tf.Tensor]] = {}

    def _resource_apply_dense(self, grad: Any, var: tf.Variable) -> Any:
        if not self._takes_whole(var):
            return super()._resource_apply_dense(grad, var)
        self._gradients[var.name] = var, tf.cast(grad, var.dtype)
        return tf.no_op()

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any:
        updates = []
        weights = weights_of([v for v, _ in self._gradients.values()], self._name)
        for name, weight in weights.items():
            grads = weight.map(lambda variable: self._gradients[variable.name][1])
            updates += self._update(name, weight, grads)
        self._gradients = {}
        return super()._finish([*update_ops, *updates], name_scope)


def weights_of(slices: Sequence[tf.Variable], user: str) -> dict[str, Pieces]:
    """Joins slices, in any order, to weights by logical name; others are weights themselves."""
    weights: dict[str, Pieces] = {}
    for variable in slices:
        sizes = tuple(static_sizes(variable))
        uncut = variable.name, Slice(sizes, (0,) * len(sizes))
        name, part = slice_of(variable) or uncut
        parts = weights.setdefault(name, Pieces(list(part.whole), {})).parts
        if part.begin in parts:
            raise PipelineError(
                f"{user}: {variable.name!r} and {parts[part.begin].beside.name!r} are the same "
                f"slice of weight {name!r}; give layers names of their own"
            )
        parts[part.begin] = Piece(variable, variable)
    for name, weight in weights.items():
        size = math.prod(weight.whole)
        updated = sum(math.prod(static_sizes(variable)) for variable in weight.values)
        if updated != size:
            raise PipelineError(
                f"{user}: weight {name!r} has {size} elements, but its slices with gradients have "
                f"{updated}; update all slices of a weight or none"
            )
        weight.parts = dict(sorted(weight.parts.items()))
    return weights
