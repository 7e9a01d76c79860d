"""Values that actions pass to each other, and the state of stages and devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.recurrent.passes.part import Grads, Tensors
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.watch.health import Direction, empty_note
from pipemesh.schedule.action import EFFECTS


@dataclasses.dataclass(frozen=True)
class Kind(Generic[MaybeTensor]):
    """A kind of value that an action leaves for each microbatch: a list of tensors.

    The list is ordered by replica.

    Attributes:
        name: names the kind.
        by_mode: True if the mode of remat decides which tensors it has.
    """

    name: str
    by_mode: bool = False


# The outputs of a stage; the outputs of stage -1 are the pipeline's inputs.
OUTPUTS: Kind[tf.Tensor] = Kind("outputs")
# Tensors that an `F` keeps for the backward pass of its stage.
KEPT: Kind[tf.Tensor] = Kind("kept", by_mode=True)
# Tensors that an `R` recomputes for it instead.
REMADE: Kind[tf.Tensor] = Kind("remade")
# The gradients of a stage's inputs. The stage after the last one represents the loss.
GRADS: Kind[tf.Tensor | None] = Kind("grads")
# Tensors that an `I` leaves for the `W` of its stage.
PENDING: Kind[tf.Tensor] = Kind("pending", by_mode=True)


class Channel(NamedTuple):
    """A kind of value of a stage."""

    kind: Kind[Any]
    stage: int


_BY_NAME: dict[str, Kind[Any]] = {k.name: k for k in (OUTPUTS, KEPT, REMADE, GRADS, PENDING)}


def taken(kind: str, stage: int, is_recomputed: bool) -> list[Channel]:
    """Returns the channels that an action of a kind reads.

    `is_recomputed` is True if an `R` comes before the backward pass.
    """
    return [
        Channel(_BY_NAME[name], stage + step) for name, step in EFFECTS[kind].taken(is_recomputed)
    ]


def given(kind: str, stage: int) -> list[Channel]:
    """Returns the channels that an action of a kind writes."""
    return [Channel(_BY_NAME[name], stage + step) for name, step in EFFECTS[kind].gives]


class Slot(NamedTuple):
    """A channel's value for one microbatch."""

    channel: Channel
    microbatch: int


Tokens = list[list[list[tf.Operation]]]


@dataclasses.dataclass
class State:
    """The state of stages and devices between their actions.

    Attributes:
        carries: for each stage, the tensors for its next microbatch.
        carry_grads: for each recurrent stage, the gradients of these tensors.
        accumulators: for each stage, the sums of its weights' gradients; None before the first.
        tokens: for each home, for each of its devices the operations that end its latest action.
        notes: for each stage, forward and backward, for each replica where a value was not finite;
            see `health`.
    """

    carries: list[Tensors]
    carry_grads: list[Grads]
    accumulators: list[Tensors | None]
    tokens: Tokens
    notes: dict[Direction, list[Tensors]]

    @classmethod
    def before(cls, stages: Sequence[Stage], stage_devices: Sequence[int]) -> State:
        """Returns the state before the first action."""
        sizes = {home: len(s.devices) for home, s in zip(stage_devices, stages, strict=True)}
        return cls(
            carries=[list(stage.carry) for stage in stages],
            carry_grads=[[None] * len(stage.carry) for stage in stages],
            accumulators=[None] * len(stages),
            tokens=[[[] for _ in range(sizes[home])] for home in sorted(sizes)],
            notes={"forward": empty_notes(stages), "backward": empty_notes(stages)},
        )

    def forget_tokens_of_other_graphs(self) -> None:
        """Drops tokens of other graphs: an eager function's gradient has its own, run later."""
        graph = tf.compat.v1.get_default_graph()
        self.tokens = [
            [[op for op in token if op.graph is graph] for token in home] for home in self.tokens
        ]


def empty_notes(stages: Sequence[Stage]) -> list[Tensors]:
    """Returns notes for stages whose values are all finite."""
    return [[empty_note() for _ in range(stage.of_home.num_replicas)] for stage in stages]


class Values(Protocol):
    """The values of one action: those of its microbatch, and the state."""

    @property
    def state(self) -> State:
        """The state before the action; the action changes it."""
        ...

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        """Returns a value of the microbatch."""
        ...

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        """Stores a value for a later action."""
        ...
