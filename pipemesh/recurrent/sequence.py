"""The slice of the sequences that a stage's function is called for."""

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
    """Which part of its sequences a stage's function is given.

    Attributes:
        index: int64 scalar, from 0; a slice of `n` positions begins at position `index * n`.
        count: how many slices the sequences have; 1 where they are whole.
    """

    index: tf.Tensor
    count: int


@dataclasses.dataclass(frozen=True)
class _Call:
    slice: Slice
    # Whether the carry is that of a microbatch, so that it can start anew.
    is_piece: bool


_current: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("slice", default=None)


@contextlib.contextmanager
def calling_for(index: tf.Tensor, count: int, is_piece: bool = True) -> Iterator[None]:
    """Inside, the function of a stage is called for a slice.

    Args:
        index: int64 scalar.
        count: how many slices there are.
        is_piece: whether it is given a microbatch, and not the whole batch, of which only shapes
            and draws matter.
    """
    token = _current.set(_Call(Slice(index, count), is_piece))
    try:
        yield
    finally:
        _current.reset(token)


def current_slice() -> Slice:
    """The slice that a stage's function is called for; the whole sequences outside of one.

    Example:
        >>> from pipemesh.recurrent.sequence import current_slice
        >>> current_slice().count
        1
    """
    call = _current.get()
    return Slice(tf.constant(0, tf.int64), 1) if call is None else call.slice


def write_slice(past: tf.Tensor, new: tf.Tensor, dim: int) -> tf.Tensor:
    """What a stage keeps of whole sequences, with what the current slice adds at its positions.

    So a layer of causal attention hands on keys and values: they are its carry, of whole length,
    and its queries attend to all positions up to their own. Shapes stay static, as the executor
    needs them, whichever slice it is.

    Args:
        past: for whole sequences, of any shape.
        new: for the current slice; as `past`, but shorter along `dim`.
        dim: along which sequences lie.

    Returns:
        A tensor of the shape of `past`.

    Raises:
        PipelineError: the lengths do not fit, or are not known before the step runs.

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
    # Along a dim of its own, which slice it is. No slicing: its gradient would have an open shape.
    parts = tf.reshape(past, [*sizes[:dim], piece.count, length, *sizes[dim + 1 :]])
    here = tf.equal(tf.range(piece.count, dtype=tf.int64), piece.index)
    here = tf.reshape(here, [-1, *[1] * (len(sizes) - dim)])
    return tf.reshape(tf.where(here, tf.expand_dims(new, dim), parts), sizes)


def starting_anew(stage: Stage) -> Stage:
    """A recurrent stage whose carry starts anew with the first slice of each microbatch.

    Going backward, the gradient that comes to a microbatch from the next one is then zero, and what
    arrives at its first slice is part of that of the initial carry, summed over microbatches.

    Args:
        stage: whose carry is the initial one.
    """
    initial = [tf.convert_to_tensor(t) for t in stage.carry]

    def forward(theta: Any, carry: Any, *rest: Any) -> Any:
        call = _current.get()
        if call is not None and call.is_piece and call.slice.count > 1:
            begins = tf.equal(call.slice.index, 0)
            carry = [tf.where(begins, a, b) for a, b in zip(initial, carry, strict=True)]
        return stage.forward(theta, carry, *rest)

    return dataclasses.replace(stage, forward=forward)
