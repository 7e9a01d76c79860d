"""What runs have in common whose values lie in lists, by the number of their microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import GRADS, OUTPUTS, Channel, Kind
from pipemesh.recurrent.table.lists import Key, Lists
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.parts import parts
from pipemesh.recurrent.table.state import State

# Gives for a microbatch, or piece, an int64 scalar, the values of a channel.
Source = Callable[[tf.Tensor], Grads]


class Listed:
    """What goes into a run and comes out of it.

    Args:
        machine: performs actions.
        state: what stages hold.
        stages: the stages.
        inputs: of the pipeline, the whole batch.
        cutting: how the batch is cut.

    Attributes:
        state: what stages hold.
        lists: values that lie in lists.
        sources: for channels that no action makes a function of the microbatch.
        machine: as given.
        stages: as given.
    """

    def __init__(
        self,
        machine: Machine,
        state: State,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
    ) -> None:
        self.state = state
        self.lists = Lists(machine, stages, cutting.num_pieces)
        self.sources: dict[Channel, Source] = {
            Channel(OUTPUTS, -1): lambda m: parts(inputs, m, cutting)
        }
        self.machine = machine
        self.stages = stages
        self._cutting = cutting
        self._after_forward: dict[Key, Grads] | None = None

    def seed(self, output_grads: Grads) -> None:
        """Cuts the gradients of the outputs of the whole batch."""
        self._begin_backward(lambda m: parts(output_grads, m, self._cutting))

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        self._begin_backward(lambda m: grads * self._cutting.replicas)

    def _begin_backward(self, source: Source) -> None:
        self.sources[Channel(GRADS, len(self.stages))] = source
        # A second backward pass takes the same values once more.
        if self._after_forward is None:
            self._after_forward = dict(self.lists.handles)
        self.lists.handles = dict(self._after_forward)

    def outputs(self) -> Tensors:
        """Those of the last stage for the whole batch."""
        return self._joined(OUTPUTS, len(self.stages) - 1)

    def input_grads(self) -> Grads:
        """The gradients of the pipeline's inputs."""
        return self._joined(GRADS, 0)

    def _joined(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        joined: list[Any] = self.lists.joined(Lists.key(kind, stage, FULL), self._cutting)
        return joined
