"""A network of two layers that learns the identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.variable import Normal
from pipemesh.mesh import Shape

from ..named_dims.network import Input, Weight

ACTIVATIONS = {"none": lambda x: x, "relu": ops.relu}


class ToyNetwork:
    """A network of vectors with the dims batch, io and hidden; `activation` is one of
    ACTIVATIONS.
    """

    def __init__(
        self, batch_size: int, io_size: int, hidden_size: int, activation: str, seed: int
    ) -> None:
        shape = Shape.of(batch=batch_size, io=io_size, hidden=hidden_size)
        self._activation = ACTIVATIONS[activation]
        self.inputs = (Input(shape.select("batch", "io"), tf.float32),)
        self.weights = (
            Weight("w1", shape.select("io", "hidden"), Normal(io_size**-0.5, (seed, 1))),
            Weight("w2", shape.select("hidden", "io"), Normal(hidden_size**-0.5, (seed, 2))),
        )

    def forward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean squared error, and the reconstructed input."""
        (x,), (w1, w2) = inputs, weights
        hidden = self._activation(ops.einsum([x, w1], ["batch", "hidden"]))
        y = ops.einsum([hidden, w2], ["batch", "io"])
        return ops.reduce_mean(ops.squared_difference(y, x)), y


def batches(batch_size: int, io_size: int, seed: int) -> Iterator[list[np.ndarray]]:
    """Yields normally distributed vectors without end."""
    draw = np.random.default_rng(seed)
    while True:
        yield [draw.standard_normal([batch_size, io_size], np.float32)]
