"""A network with one hidden layer: images, ReLU units, ten classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.variable import Normal
from pipemesh.mesh import Dim, Shape

from ..named_dims.network import Input, Weight
from .digits import NUM_CLASSES, SIDE


class MnistNetwork:
    """A network of images and labels with the dims batch, rows, cols, hidden and classes."""

    def __init__(self, batch_size: int, hidden_size: int, seed: int) -> None:
        batch, hidden = Dim("batch", batch_size), Dim("hidden", hidden_size)
        rows, cols = Dim("rows", SIDE), Dim("cols", SIDE)
        self._classes = Dim("classes", NUM_CLASSES)
        self.inputs = (
            Input(Shape((batch, rows, cols)), tf.float32),
            Input(Shape((batch,)), tf.int32),
        )
        self.weights = (
            Weight("w1", Shape((rows, cols, hidden)), Normal(1 / SIDE, (seed, 1))),
            Weight(
                "w2",
                Shape((hidden, self._classes)),
                Normal(1 / math.sqrt(hidden_size), (seed, 2)),
            ),
        )

    def forward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean cross entropy in nats, and the logits."""
        (images, labels), (w1, w2) = inputs, weights
        hidden = ops.relu(ops.einsum([images, w1], ["batch", "hidden"]))
        logits = ops.einsum([hidden, w2], ["batch", "classes"])
        right = ops.one_hot(labels, self._classes) * ops.log_softmax(logits, "classes")
        return -ops.reduce_mean(ops.reduce_sum(right, "classes")), logits
