"""A stage as the executor sees it: a function of flat lists of tensors, and its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What runs as one unit on one device.

    Attributes:
        name: names the stage in errors and in the graph.
        forward: `forward(theta, carry, inputs, microbatch, step) -> (outputs, carry)`, all lists
            of tensors but the last two, which are int64 scalars: the index of the microbatch and
            the global step. It must be free of side effects and may be traced more than once.
            `carry` goes from one microbatch of the stage to the next.
        theta: the weights; gradients flow to the floating ones.
        carry: its value before the first microbatch.
        device: name of the TensorFlow device that all operations of the stage are placed on.
        dtypes: for each of `theta` the dtype that the stage computes with; by default the
            pipeline's `compute_dtype`.
        recurrent: whether gradients flow through the carry, from each microbatch back to the one
            before and at last to `carry`. If not, the carry is a mere count of what was seen.
    """

    name: str
    forward: Callable[
        [Tensors, Tensors, Tensors, tf.Tensor, tf.Tensor | None],
        tuple[list[tf.Tensor], list[tf.Tensor]],
    ]
    theta: Tensors
    carry: Tensors
    device: str
    recurrent: bool = False
    dtypes: Sequence[tf.DType] | None = None
