"""A function that is cut from the graph of a stage, for one of its replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import Call
from pipemesh.recurrent.passes.gradients import GradName

Tensors = list[tf.Tensor]
Grads = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Part:
    """A function on the devices of its replica.

    Attributes:
        device: the first device of the replica.
        call: returns a call of the function; with collectives, each time of a new function.
        has_note: True if it takes and returns a note.
    """

    device: str
    call: Callable[[], Call]
    has_note: bool

    def __call__(self, arguments: Tensors, note: Any = None) -> tuple[Tensors, Any]:
        """Returns the results and the note; without a note of its own it returns the given one."""
        with tf.device(self.device):
            if not self.has_note:
                return self.call()(arguments), note
            *results, note = self.call()([*arguments, note])
            return results, note


@dataclasses.dataclass(frozen=True)
class BackwardResult:
    """The results of a `B` or an `I`.

    Attributes:
        accumulators: the sums of weight gradients; an `I` leaves them unchanged.
        input_grads: the gradient of each input, None if there is none.
        carry_grads: the gradient of each carry, None if there is none.
        pending: after an `I`, the tensors that its `W` needs.
        notes: for each replica, where a value was not finite; see `health`.
    """

    accumulators: Tensors | None
    input_grads: Grads
    carry_grads: Grads
    pending: Tensors
    notes: Tensors


def accumulated(
    totals: Sequence[tf.Tensor | None],
    grads: Sequence[GradName],
    specs: Sequence[tf.TensorSpec],
    devices: Sequence[str],
    pasted: Iterator[tf.Tensor],
) -> Tensors:
    """Returns the sums of weights' gradients after a microbatch.

    `totals` is None for the first microbatch. `grads` are names, two for a sparse gradient, and
    `pasted` maps names to tensors.
    """
    new = []
    for total, grad, spec, device in zip(totals, grads, specs, devices, strict=True):
        with tf.device(device):
            values = tf.cast(next(pasted), spec.dtype)
            if isinstance(grad, str):
                # Not `+`: the graph optimizer merges chains of additions into one at their end,
                # even across the control dependencies that order actions, and so creates cycles.
                new.append(values if total is None else tf.add_n([total, values]))
            else:
                total = tf.zeros(spec.shape, spec.dtype) if total is None else total
                new.append(tf.tensor_scatter_nd_add(total, next(pasted)[:, None], values))
    return new
