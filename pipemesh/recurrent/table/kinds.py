"""What actions hand to each other: kinds of values, and where one of them belongs."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.schedule.action import EFFECTS


@dataclasses.dataclass(frozen=True, order=True)
class Kind(Generic[MaybeTensor]):
    """A kind of value that an action leaves of each microbatch, a list of tensors.

    Where a stage has several replicas, there come those of the first one, of the second one, and
    so on.

    Attributes:
        name: names it.
        by_mode: whether what it consists of depends on the mode of remat.
    """

    name: str
    by_mode: bool = False


# Of a stage; those of stage -1 are the pipeline's inputs.
OUTPUTS: Kind[tf.Tensor] = Kind("outputs")
# What an `F` leaves for the backward pass of its stage.
KEPT: Kind[tf.Tensor] = Kind("kept", by_mode=True)
# What an `R` leaves for it instead.
REMADE: Kind[tf.Tensor] = Kind("remade")
# The gradients of a stage's inputs; those of the stage behind the last one are given.
GRADS: Kind[tf.Tensor | None] = Kind("grads")
# What an `I` leaves for the `W` of its stage.
PENDING: Kind[tf.Tensor] = Kind("pending", by_mode=True)


class Channel(NamedTuple):
    """A kind of value of a stage."""

    kind: Kind[Any]
    stage: int


_BY_NAME: dict[str, Kind[Any]] = {k.name: k for k in (OUTPUTS, KEPT, REMADE, GRADS, PENDING)}


def taken(kind: str, stage: int, is_recomputed: bool) -> list[Channel]:
    """Returns the channels that an action of a kind takes a value from.

    Args:
        kind: of the action, a key of `pipemesh.schedule.action.EFFECTS`.
        stage: of the action.
        is_recomputed: whether an `R` comes before its backward pass.
    """
    return [
        Channel(_BY_NAME[name], stage + step) for name, step in EFFECTS[kind].taken(is_recomputed)
    ]


def given(kind: str, stage: int) -> list[Channel]:
    """Returns the channels that an action of a kind gives a value to."""
    return [Channel(_BY_NAME[name], stage + step) for name, step in EFFECTS[kind].gives]


class Slot(NamedTuple):
    """That of one microbatch."""

    channel: Channel
    microbatch: int
