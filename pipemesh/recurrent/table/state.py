"""What stages and devices hold from one action to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import Kind
from pipemesh.recurrent.watch.health import Direction, empty_note

Tokens = list[list[list[tf.Operation]]]


@dataclasses.dataclass
class State:
    """What stages and devices hold between their actions.

    Attributes:
        carries: of each stage, what it hands to its next microbatch.
        carry_grads: of each stage, the gradient of what it handed on, if it is recurrent.
        accumulators: of each stage, the sums of its weights' gradients; None before the first.
        tokens: of each home, for each of its devices the operations that end its latest action.
        notes: of each stage, forward and backward, for each replica where a value was not finite;
            see `health`.
    """

    carries: list[Tensors]
    carry_grads: list[Grads]
    accumulators: list[Tensors | None]
    tokens: Tokens
    notes: dict[Direction, list[Tensors]]

    @classmethod
    def before(cls, stages: Sequence[Stage], stage_devices: Sequence[int]) -> State:
        """The state before the first action.

        Args:
            stages: the stages.
            stage_devices: for each stage the number of its home.
        """
        sizes = {home: len(s.devices) for home, s in zip(stage_devices, stages, strict=True)}
        return cls(
            carries=[list(stage.carry) for stage in stages],
            carry_grads=[[None] * len(stage.carry) for stage in stages],
            accumulators=[None] * len(stages),
            tokens=[[[] for _ in range(sizes[home])] for home in sorted(sizes)],
            notes={"forward": empty_notes(stages), "backward": empty_notes(stages)},
        )

    def values(self) -> list[Any]:
        """All of it that are tensors; `with_values` takes it back."""
        return [self.carries, self.carry_grads, self.accumulators, self.notes]

    def with_values(self, values: list[Any], tokens: Tokens) -> State:
        """The state that has other tensors and tokens."""
        carries, carry_grads, accumulators, notes = values
        return State(carries, carry_grads, accumulators, tokens, notes)

    def forget_tokens_of_other_graphs(self) -> None:
        """A function called eagerly has its gradient in another graph, which runs after it."""
        graph = tf.compat.v1.get_default_graph()
        self.tokens = [
            [[op for op in token if op.graph is graph] for token in home] for home in self.tokens
        ]


def empty_notes(stages: Sequence[Stage]) -> list[Tensors]:
    """The notes of stages whose replicas have found nothing."""
    return [[empty_note() for _ in range(stage.of_home.num_replicas)] for stage in stages]


class Values(Protocol):
    """Where actions find what others made.

    What belongs to a microbatch is addressed by a kind and a stage, for the microbatch of the
    action that is being performed. What a stage or a device holds from action to action is in
    `state`.
    """

    @property
    def state(self) -> State:
        """What is held from action to action."""
        ...

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        """What was written."""
        ...

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        """Leaves something for a later action."""
        ...
