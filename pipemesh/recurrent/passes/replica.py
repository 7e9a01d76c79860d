"""The part of a traced graph that computes the rows of one replica."""

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
    """The part of a traced graph of one replica.

    Attributes:
        device: the first device of the replica.
        number: among the replicas of its stage; None if it is the only one.
        theta: placeholders of the weights.
        carry: placeholders of the carry, from the previous microbatch or replica.
        inputs: placeholders of its rows.
        outputs: the tensors that it returns.
        carry_out: the carry that it returns.
        spans: the operations of its layers.
        replay: draws the random numbers of its forward pass again.
        probes: the tensors to check for finite values.
        summaries: its summaries for a TF1 graph; the last one of its carry.
        operations: the range of its operations in the graph, end excluded.
        copies: its own placeholders for captured weights, by the shared placeholder; empty in the
            first replica.
        devices: with several devices, for each of theta, then of the inputs, its device.
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
        """Gives the replica its own placeholders for captured weights."""
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
        """Adds the gradient of the replica to the graph.

        `live` are the outputs of a replica with an incoming gradient; `first_output` is the number
        of outputs of earlier replicas.
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
                    # The gradient of a copy is that of its original.
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
    """Places operations on a device, with stage and replica in their names."""
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(tf.device(device))
        scopes.enter_context(label_scope("stage", stage))
        if number is not None:
            scopes.enter_context(label_scope("replica", str(number)))
        yield


def joined(parts: Sequence[StageGradients]) -> StageGradients:
    """Returns the gradients of all replicas in one list; only the first one has a carry's."""
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
