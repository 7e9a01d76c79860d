"""Graphs of functions while they are traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import tensorflow as tf

# What TensorFlow traces the functions of a `tf.while_loop` into; the version is pinned to 2.21.
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)


def loop_counter(graph: tf.Graph) -> tf.Tensor | None:
    """How often a `tf.while_loop` has turned, if a graph is that of one of its functions."""
    if isinstance(graph, (WhileBodyFuncGraph, WhileCondFuncGraph)):
        # TensorFlow counts the iterations in the first argument of both functions.
        return graph.get_operations()[0].outputs[0]
    return None


def is_in_old_loop() -> bool:
    """Whether operations are added to a loop of TF1's old kind."""
    graph: Any = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    return context is not None and context.IsWhileContext()


@contextlib.contextmanager
def reads_replaced(replace: Callable[[Any, tf.DType], tf.Tensor]) -> Iterator[None]:
    """Inside, variables of the outside are not read in the graph being traced.

    In the graph itself: a branch or a loop inside of it has a graph of its own.

    Args:
        replace: takes the handle outside, and the dtype; returns the tensor of the outside that is
            used instead.
    """
    # The method through which all operations are added has no public name.
    graph: Any = tf.compat.v1.get_default_graph()
    create = graph._create_op_internal

    def create_or_capture(kind: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "ReadVariableOp":
            # Handles of eager variables have been captured by now, those of graphs have not.
            outer = next((o for o, inner in graph.captures if inner is inputs[0]), inputs[0])
            if getattr(outer, "graph", None) is not graph:
                # A placeholder, which is the operation that has the value as its output.
                value = replace(outer, tf.as_dtype(kwargs["attrs"]["dtype"].type))
                return graph.capture(value).op
        return create(kind, inputs, *args, **kwargs)

    graph._create_op_internal = create_or_capture
    try:
        yield
    finally:
        del graph._create_op_internal


def drop_unused_captures(graph: tf.Graph, ids: Container[int]) -> None:
    """Lets a graph forget captures that nothing uses.

    Args:
        graph: that is being traced.
        ids: the `id` of the tensors outside that may be forgotten.
    """
    for outer, inner in list(graph.captures):
        if id(outer) in ids and not inner.consumers():
            graph._function_captures.pop(id(outer))
