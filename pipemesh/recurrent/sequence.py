"""The sequence slice that a stage's function is called for."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.stage import Stage


@dataclasses.dataclass(frozen=True)
class Slice:
    """The part of its sequences that a stage's function gets.

    Attributes:
        index: int64 scalar, from 0; a slice of `n` positions begins at position `index * n`.
        count: number of slices; 1 for whole sequences.
    """

    index: tf.Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class _Call:
    slice: Slice
    # True if the carry belongs to one microbatch, so that it can be reset.
    is_piece: bool


_current: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("slice", default=None)


@contextlib.contextmanager
def calling_for(index: tf.Tensor, count: int, is_piece: bool = True) -> Iterator[None]:
    """Sets the slice that `current_slice` returns inside the context.

    `is_piece` is False if the function gets the whole batch, which is traced for shapes and draws
    only.
    """
    token = _current.set(_Call(Slice(index, count), is_piece))
    try:
        yield
    finally:
        _current.reset(token)


def current_slice() -> Slice:
    """Returns the slice that a stage's function is called for; by default the whole sequence.

    Example:
        >>> from pipemesh.recurrent.sequence import current_slice
        >>> current_slice().count
        1
    """
    call = _current.get()
    return Slice(tf.constant(0, tf.int64), 1) if call is None else call.slice


def write_slice(past: tf.Tensor, new: tf.Tensor, dim: int) -> tf.Tensor:
    """Writes the current slice into a tensor of whole sequences, at its positions.

    A layer of causal attention can so keep keys and values of whole length as its carry. Its
    queries attend to all positions up to their own. Shapes stay static, as the executor requires.

    Args:
        past: the tensor of whole sequences, of any shape.
        new: the tensor of the current slice; like `past`, but shorter along `dim`.
        dim: the dim of the positions.

    Returns:
        A tensor of the shape of `past`.

    Raises:
        PipelineError: the lengths do not fit, or are not static.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.recurrent.sequence import calling_for, write_slice
        >>> with calling_for(tf.constant(1, tf.int64), 3):
        ...     write_slice(tf.zeros([6]), tf.constant([1.0, 2.0]), 0).numpy().tolist()
        [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    """
    sizes, own, piece = past.shape.as_list(), new.shape.as_list(), current_slice()
    length = own[dim] or 0
    if None in own or [*own[:dim], length * piece.count, *own[dim + 1 :]] != sizes:
        raise PipelineError(
            f"a slice of shape {new.shape} is written into {past.shape} along dim {dim}; give it "
            f"the same shape but for the length there, which is that of {piece.count} slices, all "
            "of it known before the step runs"
        )
    if piece.count == 1:
        return new
    # The index of the slice becomes a dim of its own. `tf.slice` would give the gradient an unknown
    # shape.
    parts = tf.reshape(past, [*sizes[:dim], piece.count, length, *sizes[dim + 1 :]])
    here = tf.equal(tf.range(piece.count, dtype=tf.int64), piece.index)
    here = tf.reshape(here, [-1, *[1] * (len(sizes) - dim)])
    return tf.reshape(tf.where(here, tf.expand_dims(new, dim), parts), sizes)


def starting_anew(stage: Stage) -> Stage:
    """Returns a recurrent stage whose carry is reset at the first slice of each microbatch.

    In the backward pass, the gradient from the next microbatch is then zero. The gradient that
    leaves the first slice belongs to the initial carry and is summed over microbatches.
    """
    initial = [tf.convert_to_tensor(t) for t in stage.carry]

    def forward(theta: Any, carry: Any, *rest: Any) -> Any:
        call = _current.get()
        if call is not None and call.is_piece and call.slice.count > 1:
            begins = tf.equal(call.slice.index, 0)
            carry = [tf.where(begins, a, b) for a, b in zip(initial, carry, strict=True)]
        return stage.forward(theta, carry, *rest)

    return dataclasses.replace(stage, forward=forward)
