"""Whether the replicas of a stage compute each with rows of its own."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.labels import labelled
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.replica import Replica


def check_apart(
    graph: tf.Graph, replicas: Sequence[Replica], microbatch: tf.Tensor, what: str
) -> None:
    """Checks that no replica uses what another one has computed, but for the carry.

    Python code that keeps a tensor from one call to the next makes a replica compute with the rows
    of another one, or with its copies of weights, whose gradients would be lost. What depends
    neither on rows nor on weights nor on the microbatch is the same for all, and may be kept.

    Args:
        graph: their graph.
        replicas: its parts.
        microbatch: the placeholder of the microbatch's number.
        what: names the stage in errors.

    Raises:
        PipelineError: one does.
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
            # A gradient that arrives is its own; what is captured is the same for all.
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
