"""What a stage computes with the rows of one of its replicas: a part of its traced graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import label_scope
from pipemesh.backend.structure import is_differentiable
from pipemesh.randomness.scope import LayerSpan, Replay, gradient_scope
from pipemesh.recurrent.passes.captures import Captured
from pipemesh.recurrent.passes.gradients import StageGradients, differentiate
from pipemesh.recurrent.passes.summaries import Summaries
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.watch.probes import StageProbes


@dataclasses.dataclass
class Replica:
    """A part of a traced graph.

    Attributes:
        device: where it lies; of several devices the first one.
        number: among the replicas of its stage; None if it is the only one.
        theta: what stands for the weights.
        carry: what it takes from the microbatch, or the replica, before.
        inputs: what stands for its rows.
        outputs: what it returns.
        carry_out: what it hands on.
        spans: the operations of its layers.
        replay: draws the random numbers of its forward pass again.
        probes: where values that are not finite are looked for.
        summaries: what it tells a TF1 graph; the last one of its carry.
        operations: where in the graph its operations lie, from the first to before the last.
        copies: for the tensors that stand for captured weights its own; none in the first one.
        devices: if it has several, for each of theta, then of the inputs, the one that it lies on.
    """

    device: str
    number: int | None
    theta: list[tf.Tensor]
    carry: list[tf.Tensor]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    carry_out: list[tf.Tensor]
    spans: Sequence[LayerSpan]
    replay: Replay
    probes: StageProbes
    summaries: Summaries | None
    operations: list[tuple[int, int]]
    copies: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: tuple[list[str], list[str]] | None = None

    def copy_captured(self, graph: tf.Graph, captured: Sequence[Captured]) -> None:
        """Gives it placeholders of its own for what the stage has captured."""
        with graph.as_default():
            for weight in captured:
                value = graph.get_tensor_by_name(weight.name)
                copy = tf.compat.v1.placeholder(value.dtype, value.shape)
                self.copies[weight.name] = copy.name

    def differentiate(
        self,
        graph: tf.Graph,
        stage: Stage,
        captured: Sequence[Captured],
        live: Iterable[int],
        first_output: int,
    ) -> StageGradients:
        """Adds its gradient to the graph.

        Args:
            graph: the traced graph.
            stage: the stage.
            captured: what the stage has captured.
            live: those of its outputs that a gradient arrives at.
            first_output: how many outputs the replicas before it have.
        """
        begin = len(graph.get_operations())
        with (
            graph.as_default(),
            replica_scope(stage.name, self.device, self.number),
            self.replay.enter(self.replay.tensors),
            gradient_scope(),
        ):
            found = differentiate(
                stage,
                [
                    # The gradient of a copy is that of what it is a copy of.
                    *(None if i in stage.copies else t for i, t in enumerate(self.theta)),
                    *(weight.source for weight in captured),
                ],
                self.carry,
                self.inputs,
                {
                    first_output + i: self.outputs[i]
                    for i in live
                    if is_differentiable(self.outputs[i])
                },
                self.carry_out,
                self.probes.sources,
                self.devices,
            )
        self.operations.append((begin, len(graph.get_operations())))
        return found


@contextlib.contextmanager
def replica_scope(stage: str, device: str, number: int | None) -> Iterator[None]:
    """Operations made inside lie on the device, and their names say stage and replica.

    Args:
        stage: name of the stage.
        device: of the replica.
        number: of the replica; None if it is the only one.
    """
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(tf.device(device))
        scopes.enter_context(label_scope("stage", stage))
        if number is not None:
            scopes.enter_context(label_scope("replica", str(number)))
        yield


def joined(parts: Sequence[StageGradients]) -> StageGradients:
    """The gradients of all replicas, one after the other; only the first one has a carry's."""
    first = parts[0]

    def all_of(get: Callable[[StageGradients], list[Any]]) -> list[Any]:
        return [name for part in parts for name in get(part)]

    return StageGradients(
        of_outputs={i: name for part in parts for i, name in part.of_outputs.items()},
        of_carry_out=first.of_carry_out,
        of_theta=all_of(lambda part: part.of_theta),
        of_inputs=all_of(lambda part: part.of_inputs),
        of_carry=first.of_carry,
        of_probes=all_of(lambda part: part.of_probes),
    )
