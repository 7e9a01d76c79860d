"""A stage as the executor sees it: a function of flat lists of tensors, and its home."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.recurrent.home import Home

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What runs as one unit.

    Attributes:
        name: names the stage in errors and in the graph.
        forward: `forward(theta, carry, inputs, microbatch, step) -> (outputs, carry)`, all lists
            of tensors but the last two, which are int64 scalars: the index of the microbatch and
            the global step. It must be free of side effects and may be traced more than once.
            `carry` goes from one microbatch of the stage to the next. With several replicas it is
            called for each, as if the parts of microbatches were microbatches themselves.
        theta: the weights; gradients flow to the floating ones.
        carry: its value before the first microbatch.
        home: where it runs; names of TensorFlow devices, one or several, are a home, too.
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
    home: Home | str | Sequence[str]
    recurrent: bool = False
    dtypes: Sequence[tf.DType] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Home.of(self.home))

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each replica."""
        return Home.of(self.home).devices

    @property
    def device(self) -> str:
        """The first of them."""
        return self.devices[0]
