"""A function that is cut out of the graph of a stage, for one of its replicas."""

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
        device: of the replica, the first one.
        call: gives a call of the function; of one of its own each time, if it has collectives.
        has_note: whether it takes a note, and returns it.
    """

    device: str
    call: Callable[[], Call]
    has_note: bool

    def __call__(self, arguments: Tensors, note: Any = None) -> tuple[Tensors, Any]:
        """The results for the arguments, and the note; without one it is what was given."""
        with tf.device(self.device):
            if not self.has_note:
                return self.call()(arguments), note
            *results, note = self.call()([*arguments, note])
            return results, note


@dataclasses.dataclass(frozen=True)
class BackwardResult:
    """What a `B` or an `I` gives.

    Attributes:
        accumulators: the sums of weight gradients; after an `I` what was given.
        input_grads: the gradient of each input, None if there is none.
        carry_grads: the gradient of each carry, None if there is none.
        pending: after an `I`, what its `W` needs.
        notes: of each replica, where something was not finite; see `health`.
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
    """The sums of weights' gradients after a microbatch.

    Args:
        totals: the sums before, None if there are none yet.
        grads: names of the gradients; a sparse one has two.
        specs: shapes and dtypes of the sums.
        devices: where they lie.
        pasted: gives the tensors of the gradients.
    """
    new = []
    for total, grad, spec, device in zip(totals, grads, specs, devices, strict=True):
        with tf.device(device):
            values = tf.cast(next(pasted), spec.dtype)
            if isinstance(grad, str):
                # Not `+`: the graph optimizer merges chains of additions into one at their end,
                # also across the control dependencies that order actions, and so builds cycles.
                new.append(values if total is None else tf.add_n([total, values]))
            else:
                total = tf.zeros(spec.shape, spec.dtype) if total is None else total
                new.append(tf.tensor_scatter_nd_add(total, next(pasted)[:, None], values))
    return new
