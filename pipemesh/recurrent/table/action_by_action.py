"""Performs a schedule action by action: each has its own operations in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.batch import join, split
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.values import GRADS, OUTPUTS, Channel, Kind, Slot, State
from pipemesh.schedule import Action


class ActionByAction:
    """A performer that stores each value under the number of its microbatch, or piece."""

    def __init__(
        self,
        machine: Machine,
        state: State,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
        modes: Mapping[tuple[int, int], Mode],
    ) -> None:
        self.state = state
        self._machine = machine
        self._microbatch = 0
        self._modes = modes
        self._stages = stages
        self._cutting = cutting
        self._values: dict[Slot, list[Any]] = {}
        self._put(OUTPUTS, -1, inputs, stages[0].device)

    def perform(self, actions: Sequence[Action]) -> None:
        """Performs actions in order."""
        self.state.forget_tokens_of_other_graphs()
        numbers: dict[tuple[int, str], tf.Tensor] = {}
        for action in actions:
            self._microbatch = action.microbatch
            mode = self._modes[action.stage, action.microbatch]
            with self._machine.acting(f"action_{self._cutting.text(action)}", action.stage):
                key = action.microbatch, self._stages[action.stage].device
                if key not in numbers:
                    numbers[key] = tf.constant(action.microbatch, tf.int64)
                self._machine.act(action.kind, action.stage, mode, numbers[key], self)

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        """Returns a value of the current microbatch."""
        return self._values[Slot(Channel(kind, stage), self._microbatch)]

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        """Stores a value for the current microbatch."""
        self._values[Slot(Channel(kind, stage), self._microbatch)] = [*value]

    def seed(self, output_grads: Grads) -> None:
        """Splits the gradients of the outputs of the whole batch."""
        self._put(GRADS, len(self._stages), output_grads, self._stages[-1].device)

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        channel = Channel(GRADS, len(self._stages))
        for m in range(self._cutting.num_pieces):
            self._values[Slot(channel, m)] = grads * self._cutting.replicas

    def outputs(self) -> Tensors:
        """Returns the last stage's outputs for the whole batch."""
        return self._joined(OUTPUTS, len(self._stages) - 1)

    def input_grads(self) -> Grads:
        """Returns the gradients of the pipeline's inputs."""
        return self._joined(GRADS, 0)

    def _joined(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        replicas = self._cutting.replicas
        by_part = []
        for m in range(self._cutting.num_pieces):
            values = self._values[Slot(Channel(kind, stage), m)]
            count = len(values) // replicas
            by_part += [values[replica * count :][:count] for replica in range(replicas)]
        devices, places = self._stages[stage].devices, self._machine.places(kind, stage)
        joined: list[Any] = []
        for *parts, place in zip(*by_part, places[: len(by_part[0])], strict=True):
            with tf.device(devices[place]):
                joined.append(None if parts[0] is None else join(parts, self._cutting))
        return joined

    def _put(
        self, kind: Kind[MaybeTensor], stage: int, tensors: Sequence[MaybeTensor], device: str
    ) -> None:
        """Gives each piece its parts of tensors, replica by replica."""
        none = [[None] * self._cutting.replicas] * self._cutting.num_pieces
        with tf.device(device):
            pieces = [none if t is None else split(t, self._cutting) for t in tensors]
        for m in range(self._cutting.num_pieces):
            self._values[Slot(Channel(kind, stage), m)] = [
                piece[m][replica] for replica in range(self._cutting.replicas) for piece in pieces
            ]
