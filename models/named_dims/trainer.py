"""Networks on named dims, and their trainers by gradient descent under any mesh and lowering."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from pipemesh.lowering import Cores, Lowering, OperationCosts, PlacementLowering, Tensor, ops
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.variable import Initializer, Variable
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.text import columns

Arrays = Sequence[np.ndarray]


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


class Trainer(abc.ABC):
    """A network whose variables are on the devices of a mesh.

    It has the attributes `variables` (weights) and `costs` (of a step). It raises
    LayoutError if the rules cannot split a tensor of the network.
    """

    costs: OperationCosts

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        rules: LayoutRules,
        devices: Sequence[str],
        learning_rate: float,
    ) -> None:
        self._network, self._learning_rate = network, learning_rate
        self.variables = [
            Variable.create(
                weight.name, rules.tensor_layout(weight.shape, mesh), devices, weight.initializer
            )
            for weight in network.weights
        ]
        self._build(mesh, rules, devices)

    @abc.abstractmethod
    def _build(self, mesh: Mesh, rules: LayoutRules, devices: Sequence[str]) -> None:
        """Sets `costs`, and makes the functions of a step and of an evaluation."""

    @abc.abstractmethod
    def train_step(self, batch: Arrays) -> float:
        """Updates the weights; returns the loss before the update."""

    @abc.abstractmethod
    def forward(self, batch: Arrays) -> tuple[float, np.ndarray]:
        """Returns the loss and the network's output, without an update."""

    def _forward(
        self, lowering: Lowering, weights: Sequence[Slices], batch: Sequence[tf.Tensor]
    ) -> tuple[Tensor, Tensor]:
        return self._network.forward(
            [
                ops.import_tensor(lowering, tensor, part.shape)
                for tensor, part in zip(batch, self._network.inputs, strict=True)
            ],
            [
                Tensor(lowering, slices, weight.shape)
                for slices, weight in zip(weights, self._network.weights, strict=True)
            ],
        )

    def _descend(
        self, lowering: Lowering, weights: Sequence[Slices], batch: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[Slices]]:
        """Returns the loss and the new weights."""
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss, _ = self._forward(lowering, weights, batch)
        grads = ops.gradients(loss, weights, tape)
        new = [
            lowering.raw_map(lambda w, g: w - self._learning_rate * g, *pair)
            for pair in zip(weights, grads, strict=True)
        ]
        return ops.export_tensor(loss), new

    def _evaluate(
        self, lowering: Lowering, weights: Sequence[Slices], batch: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        loss, output = self._forward(lowering, weights, batch)
        return ops.export_tensor(loss), ops.export_tensor(output)


class PlacementTrainer(Trainer):
    """One graph has the operations of all devices."""

    def _build(self, mesh: Mesh, rules: LayoutRules, devices: Sequence[str]) -> None:
        lowering = PlacementLowering(mesh, rules, devices)
        self.costs = lowering.costs

        def train(*batch: tf.Tensor) -> tf.Tensor:
            loss, new = self._descend(lowering, self._weights(lowering), batch)
            for variable, slices in zip(self.variables, new, strict=True):
                for part, value in zip(variable.variables, slices, strict=True):
                    with tf.device(part.device):
                        part.assign(value)
            return loss

        def evaluate(*batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            other = PlacementLowering(mesh, rules, devices)
            return self._evaluate(other, self._weights(other), batch)

        specs = [part.spec for part in self._network.inputs]
        self._train = tf.function(train, autograph=False).get_concrete_function(*specs)
        self._evaluation = tf.function(evaluate, autograph=False, input_signature=specs)

    def _weights(self, lowering: Lowering) -> list[Slices]:
        return [variable.tensor(lowering).slices for variable in self.variables]

    def train_step(self, batch: Arrays) -> float:
        return float(self._train(*map(tf.constant, batch)))

    def forward(self, batch: Arrays) -> tuple[float, np.ndarray]:
        loss, output = self._evaluation(*map(tf.constant, batch))
        return float(loss), output.numpy()


class SimdTrainer(Trainer):
    """A trainer in which every device runs the same program on its slices."""

    def _build(self, mesh: Mesh, rules: LayoutRules, devices: Sequence[str]) -> None:
        number = len(self.variables)
        specs = [
            *(tf.TensorSpec(v.layout.slice_shape, v.variables[0].dtype) for v in self.variables),
            *(part.spec for part in self._network.inputs),
        ]

        def train(lowering: Lowering, *args: tf.Tensor) -> Any:
            loss, new = self._descend(lowering, [(w,) for w in args[:number]], args[number:])
            return loss, [slices[0] for slices in new]

        def evaluate(lowering: Lowering, *args: tf.Tensor) -> Any:
            return self._evaluate(lowering, [(w,) for w in args[:number]], args[number:])

        cores = Cores(mesh, devices)
        self._train = cores.function(train, rules, *specs)
        self._evaluation = cores.function(evaluate, rules, *specs)
        self.costs = self._train.lowering.costs

    def _args(self, batch: Arrays) -> list[list[tf.Tensor]]:
        tensors = [tf.constant(array) for array in batch]
        parts = zip(*(variable.variables for variable in self.variables), strict=True)
        return [[*(part.read_value() for part in core), *tensors] for core in parts]

    def train_step(self, batch: Arrays) -> float:
        results = self._train(self._args(batch))
        for core, (_, new) in enumerate(results):
            for variable, value in zip(self.variables, new, strict=True):
                part = variable.variables[core]
                with tf.device(part.device):
                    part.assign(value)
        return float(results[0][0])

    def forward(self, batch: Arrays) -> tuple[float, np.ndarray]:
        loss, output = self._evaluation(self._args(batch))[0]
        return float(loss), output.numpy()


TRAINERS: dict[str, type[Trainer]] = {"placement": PlacementTrainer, "simd": SimdTrainer}


def plan_report(trainer: Trainer, mesh: Mesh, rules: LayoutRules) -> str:
    """Returns the slices that a device holds, and what it sends and computes in a step."""
    lines = [
        weight_table(trainer),
        "",
        "a device sends and computes in a step:",
        str(trainer.costs),
    ]
    used = {axis for _, axis in rules.rules}
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size > 1 and axis not in used:
            lines.append(
                f"no rule splits over axis {axis!r}: the {size} devices along it compute the same"
            )
    return "\n".join(lines)


def weight_table(trainer: Trainer) -> str:
    """Returns a table of each weight's layout, its parameters, and its parameters on a device."""
    rows = [("weight", "layout", "parameters", "a device")]
    total = held = 0
    for variable in trainer.variables:
        size = variable.layout.shape.size
        part = int(variable.variables[0].shape.num_elements())
        rows.append((variable.name, str(variable.layout), f"{size:,}", f"{part:,}"))
        total, held = total + size, held + part
    rows.append(("total", "", f"{total:,}", f"{held:,}"))
    return "\n".join(columns(rows, left=range(2)))
