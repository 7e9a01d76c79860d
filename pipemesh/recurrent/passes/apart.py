"""Checks that each replica of a stage computes with its own rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.labels import labelled
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.replica import Replica


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
