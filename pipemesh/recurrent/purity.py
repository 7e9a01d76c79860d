"""What a stage may not contain."""

from __future__ import annotations

import tensorflow as tf

from pipemesh.errors import PipelineError

# Reading a variable is free of side effects; loops and branches have state if anything in them
# may have it, be it an assertion.
_ALLOWED_STATE = frozenset(
    ["VarHandleOp", "ReadVariableOp", "While", "If", "Case", "StatefulPartitionedCall"]
)


def check_pure(graph: tf.Graph, stage: str) -> None:
    """Checks that a graph has neither side effects nor state.

    Raises:
        PipelineError: it has.
    """
    for operation in graph.get_operations():
        if operation.op_def.is_stateful and operation.type not in _ALLOWED_STATE:
            raise PipelineError(
                f"stage {stage!r} contains {operation.name!r}, a {operation.type} operation, which "
                "has side effects or state; a stage must be a pure function, because it is "
                "computed microbatch by microbatch and again in the backward pass (for Python "
                "functions there is tf.numpy_function(..., stateful=False))"
            )
