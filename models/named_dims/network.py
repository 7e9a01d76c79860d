"""A network on named dims: its inputs, its weights and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from pipemesh.lowering import Tensor
from pipemesh.lowering.variable import Initializer
from pipemesh.mesh import Shape


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor of a batch."""

    shape: Shape
    dtype: tf.DType

    @property
    def spec(self) -> tf.TensorSpec:
        return tf.TensorSpec(self.shape.sizes, self.dtype)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A variable and its initial value."""

    name: str
    shape: Shape
    initializer: Initializer


class Network(Protocol):
    """A network that does not depend on meshes and layouts."""

    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]

    def forward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean loss of a batch, a scalar, and the network's output."""
        ...


def dim_names(network: Network) -> tuple[str, ...]:
    """Returns all dims of inputs and weights."""
    shapes = [part.shape for part in (*network.inputs, *network.weights)]
    return tuple(dict.fromkeys(name for shape in shapes for name in shape.names))
