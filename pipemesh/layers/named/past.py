"""Keys and values that attention hands on from slice to slice of sequences."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.operations import JOINED, SHARED, mark
from pipemesh.backend.structure import setting
from pipemesh.errors import PipelineError
from pipemesh.layers.named.scope import current_lowering
from pipemesh.lowering.lowering import Slices
from pipemesh.recurrent.stage import current_slice


class Past:
    """Keys, values and segments of earlier slices, by the path of their layer of attention.

    Unlike a `KeyValueCache` it is for training: gradients go back through it to earlier slices.
    Each slice's tensors are handed on as they are, so that all later slices share their memory.

    Args:
        kept: for each path keys, values and segments. Of each there is one tensor for each slice
            but the last, `[batch, length, ...]` on each processor; those of the current slice and
            of later ones are undefined. If slices differ in length, there are those of the earlier
            slices alone.
    """

    def __init__(self, kept: Mapping[str, Sequence[Sequence[Slices]]]) -> None:
        self.kept = {path: list(tensors) for path, tensors in kept.items()}
        self._extended: set[str] = set()

    def extend(self, path: str, *new: Slices) -> list[Slices]:
        """Adds keys, values, and segments if there are any, of the current slice.

        Returns:
            Those of whole sequences. Behind the current slice they repeat it; causal attention does
            not see that. If slices differ in length, they end with the current slice.

        Raises:
            PipelineError: the layer is called a second time for a slice.
        """
        if path in self._extended:
            raise PipelineError(
                f"{path} is called twice for a slice of sequences, and would mix the keys of both "
                "calls; make two layers, or give a schedule without slices, such as 1f1b"
            )
        self._extended.add(path)
        lowering, held, found = current_lowering(), self.kept[path], list[Slices]()
        if current_slice().span is not None:
            for number, tensor in enumerate(new):
                parts = held[number] = [*held[number], tensor]
                found.append(lowering.map(_joined, *parts) if len(parts) > 1 else tensor)
            return found
        for number, tensor in enumerate(new):
            parts = lowering.map_to_several(_extended, tensor, *held[number])
            # The parts of whole sequences, then those for the next slice.
            count = len(held[number]) + 1
            held[number] = parts[count:]
            found.append(lowering.map(_joined, *parts[:count]))
        return found


def _extended(new: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
    """Returns the parts of whole sequences, and those for the next slice."""
    # No slice needs that of the last one.
    count, last = len(parts) + 1, len(parts)
    index = tf.cast(current_slice().index, tf.int32)

    def chosen(number: int) -> list[tf.Tensor]:
        known = [*parts[:number], *[new] * (count - number)]
        # The next row needs none of them, and must not hold them.
        return [*known, *([new] * last if number == last else known[:last])]

    @custom_gradient
    def extended(*given: tf.Tensor) -> Any:
        del given

        def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
            sums = [*(a + b for a, b in zip(grads[:last], grads[count:], strict=True)), grads[last]]
            nothing = tf.zeros(new.shape, new.dtype)

            def sent(number: int) -> list[tf.Tensor]:
                return [sums[number], *sums[:number], *[nothing] * (last - number)]

            return _chosen(index, sent, count)

        return _chosen(index, chosen, count), backward

    found = extended(new, *parts)
    mark(found[0].op, SHARED)
    return found


def _joined(*parts: tf.Tensor) -> tf.Tensor:
    whole = tf.concat(parts, 1)
    mark(whole.op, JOINED)
    return whole


def _chosen(
    index: tf.Tensor, branch: Callable[[int], list[tf.Tensor]], count: int
) -> list[tf.Tensor]:
    """Returns the tensors of the branch of an index; they are not copied."""
    return tf.switch_case(index, [functools.partial(branch, number) for number in range(count)])


_current: contextvars.ContextVar[Past | None] = contextvars.ContextVar(
    "pipemesh_past", default=None
)


def past_scope(past: Past) -> contextlib.AbstractContextManager[Past]:
    """Makes causal attention inside continue earlier slices of its sequences."""
    return setting(_current, past)


def current_past() -> Past | None:
    """Returns what earlier slices have left; None where layers get whole sequences."""
    return None if current_slice().count == 1 else _current.get()


def first_position(length: int) -> tf.Tensor | int:
    """Returns the position in its sequence, int32, of the first token of a slice of `length`."""
    begin = current_slice().begin(length)
    return begin if isinstance(begin, int) else tf.cast(begin, tf.int32)


def whole_length(length: int) -> int:
    """Returns the length of the sequences whose slices have a length."""
    return current_slice().whole(length)


def past_length() -> int:
    """Returns the positions before a slice if that is known, of slices that differ in length."""
    span = current_slice().span
    return 0 if span is None else span.begin
