"""Checks that each replica of a stage computes with its own rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import label_scope, labelled
from pipemesh.backend.operation_kinds import SUMMARIES
from pipemesh.backend.structure import Gradient, is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.randomness.scope import LayerSpan, Replay, gradient_scope
from pipemesh.recurrent.passes.captures import Captured
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.watch.finite_values import StageProbes

# The tensor of a gradient; values and row indices if it is sparse; None if there is no gradient.
GradName = str | tuple[str, str] | None


@dataclasses.dataclass(frozen=True)
class StageGradients:
    """Names of the gradients in a traced graph, None where there is none."""

    of_outputs: dict[int, str]  # placeholders, by index of the floating output
    of_carry_out: dict[int, str]  # empty if the carry has no gradient
    of_theta: list[GradName]
    of_inputs: list[str | None]
    of_carry: list[str | None]
    of_probes: list[str | None]


def _grad_placeholders(tensors: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    placeholders: dict[int, tf.Tensor] = {}
    for i, t in tensors.items():
        if is_differentiable(t):
            with tf.device(t.device):
                placeholders[i] = tf.compat.v1.placeholder(t.dtype, t.shape)
    return placeholders


def _gradients(
    results: list[tf.Tensor], sources: list[tf.Tensor | None], result_grads: list[tf.Tensor]
) -> list[Gradient]:
    # The handle represents its variable.
    floating = {
        i: t
        for i, t in enumerate(sources)
        if t is not None and (is_differentiable(t) or t.dtype == tf.resource)
    }
    grads: list[Gradient] = [None] * len(sources)
    if results and floating:
        computed = tf.gradients(results, list(floating.values()), result_grads)
        for i, grad in zip(floating, computed, strict=True):
            grads[i] = grad
    return grads


def _grad_name(grad: Gradient) -> GradName:
    if isinstance(grad, tf.IndexedSlices):
        return grad.values.name, grad.indices.name
    return None if grad is None else grad.name


def flat_names(names: Iterable[GradName | tuple[str, ...]]) -> list[str]:
    """Returns the names of all tensors; a sparse gradient has two, a missing one none."""
    flat: list[str] = []
    for name in names:
        if name is not None:
            flat.extend([name] if isinstance(name, str) else name)
    return flat


@dataclasses.dataclass(frozen=True)
class Summaries:
    """The TF1 summaries of one stage, passed on in its carry; each microbatch adds its own."""

    before: tf.Tensor  # of earlier microbatches and replicas
    after: tf.Tensor  # with those of this microbatch
    collections: Sequence[str]  # of the outer graph, which get it

    @classmethod
    def found(cls, begin: int, earlier: Summaries | None) -> Summaries | None:
        """Returns the summaries among the operations of the graph being traced, without the first
        ones.

        None if there are none, or outside of a TF1 graph, where nothing collects them, as in a
        plain model.
        """
        graph: Any = tf.compat.v1.get_default_graph()
        if graph.outer_graph.building_function:
            return None
        made = [op.outputs[0] for op in graph.get_operations()[begin:] if op.type in SUMMARIES]
        if not made:
            return None
        if earlier is None:
            before = tf.compat.v1.placeholder(tf.string, [])
        else:
            before = tf.identity(earlier.after)
        names = {tensor.name for tensor in made}
        collections = [
            key
            for key in graph.get_all_collection_keys()
            if any(
                isinstance(item, tf.Tensor) and item.graph is graph and item.name in names
                for item in graph.get_collection(key)
            )
        ]
        return cls(before, tf.raw_ops.MergeSummary(inputs=[before, *made]), collections)

    def collect(self, merged: tf.Tensor) -> None:
        """Adds the summaries of all microbatches to the collections of the current graph."""
        for key in self.collections:
            tf.compat.v1.add_to_collection(key, merged)


@dataclasses.dataclass
class Replica:
    """The part of a traced graph that computes the rows of one replica."""

    device: str  # the first of the replica
    number: int | None  # None if it is the only one
    # Placeholders of its arguments.
    theta: list[tf.Tensor]
    carry: list[tf.Tensor]  # from the previous microbatch or replica
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    carry_out: list[tf.Tensor]
    spans: Sequence[LayerSpan]  # the operations of its layers
    replay: Replay  # draws the random numbers of its forward pass again
    probes: StageProbes
    summaries: Summaries | None
    operations: list[tuple[int, int]]  # ranges in the graph, ends excluded
    # its own placeholders for captured weights, by the shared ones; empty in the first
    copies: dict[str, str] = dataclasses.field(default_factory=dict)
    # of theta, and of the inputs, if it has several
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
        live: Iterable[int],  # the outputs of a replica with an incoming gradient
        first_output: int,  # number of outputs of earlier replicas
    ) -> StageGradients:
        """Adds the gradient of the replica to the graph."""
        begin = len(graph.get_operations())
        with (
            graph.as_default(),
            replica_scope(stage.name, self.device, self.number),
            self.replay.enter(self.replay.tensors),
            gradient_scope(),
        ):
            theta = [
                # The gradient of a copy is that of its original.
                *(None if i in stage.copies else t for i, t in enumerate(self.theta)),
                *(weight.source for weight in captured),
            ]
            of_outputs = _grad_placeholders({first_output + i: self.outputs[i] for i in live})
            states = self.carry if stage.recurrent else []
            of_carry_out = _grad_placeholders(dict(enumerate(self.carry_out if states else [])))
            grads = _gradients(
                [
                    *(self.outputs[i - first_output] for i in of_outputs),
                    *(self.carry_out[i] for i in of_carry_out),
                ],
                [*theta, *self.inputs, *states, *self.probes.sources],
                [*of_outputs.values(), *of_carry_out.values()],
            )
            if self.devices is not None:
                for first, devices in ((0, self.devices[0]), (len(theta), self.devices[1])):
                    for i, device in enumerate(devices, first):
                        grad = grads[i]
                        # A sparse gradient is on the device of the lookup.
                        if isinstance(grad, tf.Tensor):
                            with tf.device(device):
                                grads[i] = tf.identity(grad)
            dense = [
                None if grad is None else tf.convert_to_tensor(grad).name
                for grad in grads[len(theta) :]
            ]
        self.operations.append((begin, len(graph.get_operations())))
        after = len(self.inputs) + len(states)
        return StageGradients(
            of_outputs={i: t.name for i, t in of_outputs.items()},
            of_carry_out={i: t.name for i, t in of_carry_out.items()},
            of_theta=[_grad_name(grad) for grad in grads[: len(theta)]],
            of_inputs=dense[: len(self.inputs)],
            of_carry=dense[len(self.inputs) : after] if states else [None] * len(self.carry),
            of_probes=dense[after:],
        )


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
    return dataclasses.replace(
        parts[0],
        of_outputs={i: name for part in parts for i, name in part.of_outputs.items()},
        of_theta=[name for part in parts for name in part.of_theta],
        of_inputs=[name for part in parts for name in part.of_inputs],
        of_probes=[name for part in parts for name in part.of_probes],
    )


def check_apart(
    graph: tf.Graph, replicas: Sequence[Replica], microbatch: tf.Tensor, what: str
) -> None:
    """Checks that no replica uses a tensor of another one, except the carry.

    Python code that keeps a tensor from one call to the next mixes replicas: one computes with the
    rows or the weight copies of another, and gradients are lost. A tensor that depends on no row,
    weight or microbatch is the same for all replicas and may be kept.
    """
    operations = graph.get_operations()
    owners = {
        tensor.op: number
        for number, replica in enumerate(replicas)
        for tensor in [*replica.theta, *replica.carry, *replica.inputs]
    }
    captured = {inner.op for _, inner in graph.captures}
    parts = sorted(
        (begin, end, number)
        for number, replica in enumerate(replicas)
        for begin, end in replica.operations
    )
    for begin, end, number in parts:
        for operation in operations[begin:end]:
            if operation in owners:
                continue
            # An incoming gradient belongs to its replica; a captured tensor is the same for all.
            is_own = operation.type == "Placeholder" and operation not in captured
            for tensor in operation.inputs:
                owner = owners.get(tensor.op)
                if owner not in (None, number):
                    raise PipelineError(_text(what, operation, number, tensor, owner))
                is_own |= owner is not None or tensor is microbatch
            if is_own:
                owners[operation] = number


def _text(what: str, user: tf.Operation, number: int, used: tf.Tensor, owner: int | None) -> str:
    layer = labelled("layer", user.name)
    where = f" in layer {layer!r}" if layer is not None else ""
    return (
        f"{what} has replicas, and its operation {user.name!r} ({user.type}){where} of replica "
        f"{number} uses {used.op.name!r} ({used.op.type}), which replica {owner} has computed with "
        "its own rows and weights; the code of the stage must keep no tensor in Python (an "
        "attribute, a list, a cache) from one call to the next: compute it in each call, or hand "
        "it on in the carry"
    )
