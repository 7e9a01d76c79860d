"""The values of a run in which every action has operations of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import GRADS, OUTPUTS, Channel, Kind, Slot
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.state import State
from pipemesh.schedule import Action
from pipemesh.schedule.repeats import Loop


class Unrolled:
    """Performs actions and keeps each value under the number of its microbatch, or piece.

    Args:
        machine: performs actions.
        state: what stages hold.
        stages: the stages.
        inputs: of the pipeline, the whole batch.
        cutting: how the batch is cut.
        modes: of remat, for each stage and microbatch.

    Attributes:
        state: what stages hold.
    """

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
        self._found: dict[Slot, list[Any]] = {}
        self._put(OUTPUTS, -1, [self._split(t, stages[0].device) for t in inputs])

    def perform(self, items: Sequence[Action | Loop]) -> None:
        """Performs actions in order; there are no loops among them."""
        self.state.forget_tokens_of_other_graphs()
        numbers: dict[tuple[int, str], tf.Tensor] = {}
        for action in items:
            assert isinstance(action, Action)
            self._microbatch = action.microbatch
            mode = self._modes[action.stage, action.microbatch]
            with self._machine.acting(f"action_{self._cutting.text(action)}", action.stage):
                key = action.microbatch, self._stages[action.stage].device
                if key not in numbers:
                    numbers[key] = tf.constant(action.microbatch, tf.int64)
                self._machine.act(action.kind, action.stage, mode, numbers[key], self)

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        """What was written for the current microbatch."""
        return self._found[Slot(Channel(kind, stage), self._microbatch)]

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        """Keeps a value for the current microbatch."""
        self._found[Slot(Channel(kind, stage), self._microbatch)] = [*value]

    def seed(self, output_grads: Grads) -> None:
        """Cuts the gradients of the outputs of the whole batch."""
        none = [None] * (self._cutting.num_pieces * self._cutting.replicas)
        device = self._stages[-1].device
        parts = [none if g is None else self._split(g, device) for g in output_grads]
        self._put(GRADS, len(self._stages), parts)

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        given = Channel(GRADS, len(self._stages))
        for m in range(self._cutting.num_pieces):
            self._found[Slot(given, m)] = grads * self._cutting.replicas

    def outputs(self) -> Tensors:
        """Those of the last stage for the whole batch."""
        return self._joined(OUTPUTS, len(self._stages) - 1)

    def input_grads(self) -> Grads:
        """The gradients of the pipeline's inputs."""
        return self._joined(GRADS, 0)

    def _joined(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        replicas = self._cutting.replicas
        found = []
        for m in range(self._cutting.num_pieces):
            values = self._found[Slot(Channel(kind, stage), m)]
            count = len(values) // replicas
            found += [values[replica * count :][:count] for replica in range(replicas)]
        devices, places = self._stages[stage].devices, self._machine.places(kind, stage)
        joined: list[Any] = []
        for *parts, place in zip(*found, places[: len(found[0])], strict=True):
            with tf.device(devices[place]):
                joined.append(None if parts[0] is None else join(parts, self._cutting))
        return joined

    def _put(
        self, kind: Kind[MaybeTensor], stage: int, tensors: Sequence[Sequence[MaybeTensor]]
    ) -> None:
        """Gives each piece its parts of tensors: those of the first replica come first."""
        replicas = self._cutting.replicas
        for m in range(self._cutting.num_pieces):
            mine = range(m * replicas, (m + 1) * replicas)
            self._found[Slot(Channel(kind, stage), m)] = [
                parts[i] for i in mine for parts in tensors
            ]

    def _split(self, tensor: tf.Tensor, device: str) -> list[tf.Tensor]:
        """Its parts for the replicas of the first piece, of the second, and so on."""
        cutting = self._cutting
        with tf.device(device):
            rows = tf.split(tensor, cutting.num_parts, axis=cutting.batch_dim)
            if cutting.num_slices == 1:
                return rows
            columns = [[row] * cutting.num_slices for row in rows]
            if cutting.is_sliced(tensor.shape):
                columns = [
                    tf.split(row, cutting.num_slices, axis=cutting.sequence_dim) for row in rows
                ]
        return [
            columns[m * cutting.replicas + replica][q]
            for m in range(cutting.num_microbatches)
            for q in range(cutting.num_slices)
            for replica in range(cutting.replicas)
        ]


def join(parts: Sequence[tf.Tensor], cutting: Cutting) -> tf.Tensor:
    """What the pieces have of a tensor as that of the whole batch.

    Args:
        parts: those of the replicas of the first piece, of the second, and so on; what does not
            have the dim of the sequences is a gradient of what every slice was given, and added up.
        cutting: how the batch is cut.
    """
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    replicas, slices = cutting.replicas, cutting.num_slices
    if slices > 1:
        rows = []
        for m in range(cutting.num_microbatches):
            for replica in range(replicas):
                mine = parts[m * slices * replicas + replica :: replicas][:slices]
                is_sliced = cutting.is_sliced(parts[0].shape)
                rows.append(tf.concat(mine, cutting.sequence_dim) if is_sliced else tf.add_n(mine))
        parts = rows
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=cutting.batch_dim)
