"""Calls of the functions that a stage is cut into."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError

Tensors = list[tf.Tensor]

# Reading a variable is free of side effects; loops and branches have state if anything in them
# may have it, be it an assertion.
_ALLOWED_STATE = frozenset(
    ["VarHandleOp", "ReadVariableOp", "While", "If", "Case", "StatefulPartitionedCall"]
)


class Call:
    """Calls a concrete function with as little work in Python as possible.

    A stage's functions are differentiated by hand, and there is one call an action.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._dtypes = [t.dtype for t in function.outputs]
        self._shapes = [t.shape for t in function.outputs]
        self._captures = function.captured_inputs

    def __call__(self, arguments: Tensors) -> Tensors:
        """The results; the function's captures are added to the arguments."""
        if not self._dtypes:
            return []
        results = tf.raw_ops.PartitionedCall(
            args=[*arguments, *self._captures], Tout=self._dtypes, f=self._function
        )
        for tensor, shape in zip(results, self._shapes, strict=True):
            tensor.set_shape(shape)
        return list(results)


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
