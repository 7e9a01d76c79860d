"""Graphs of functions: their calls, the graph being traced, and those that TensorFlow runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# The only place that knows which attributes of operations are functions.
# The registry of kernels is not public; TensorFlow's version is pinned.
from tensorflow.python.framework import kernels, op_def_registry

# What TensorFlow traces the functions of a `tf.while_loop` into; the version is pinned to 2.21.
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)

from pipemesh.backend.devices import eager_context


@functools.cache
def _attributes(kind: str) -> tuple[tuple[str, bool], ...]:
    """Which attributes of an operation are functions, and whether they are lists of them."""
    definition = op_def_registry.get(kind)
    if definition is None:
        return ()
    return tuple(
        (attribute.name, attribute.type == "list(func)")
        for attribute in definition.attr
        if attribute.type in ("func", "list(func)")
    )


def called_functions(graph: tf.Graph, operation: tf.Operation) -> Iterator[tf.Graph]:
    """The graphs of the functions that an operation calls, in the order of its attributes.

    Args:
        graph: that the operation is in.
        operation: any; most call none.
    """
    for attribute, several in _attributes(operation.type):
        value = operation.get_attr(attribute)
        for function in value if several else [value]:
            found = graph._get_function(function.name)
            if found is not None and getattr(found, "graph", None) is not None:
                yield found.graph


def operations_within(
    graph: tf.Graph, inside: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tf.Operation]]:
    """The operations of a graph and of the functions that it calls.

    Args:
        graph: the graph.
        inside: names of the functions around it, the outermost first.

    Yields:
        Each operation behind the names of the functions that it is in.
    """
    seen: set[int] = set()
    for operation in graph.get_operations():
        yield inside, operation
        for function in called_functions(graph, operation):
            if id(function) not in seen:
                seen.add(id(function))
                yield from operations_within(function, (*inside, function.name))


class Bodies:
    """The functions of a graph that is written down, which go with it as lists of nodes.

    Args:
        graph_def: the graph.
    """

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._functions: Mapping[str, Sequence[tf.compat.v1.NodeDef]] = {
            f.signature.name: f.node_def for f in graph_def.library.function
        }

    def called(self, node: tf.compat.v1.NodeDef) -> list[str]:
        """Names of the functions that a node calls."""
        names = [
            function.name
            for attribute, several in _attributes(node.op)
            for function in (
                node.attr[attribute].list.func if several else [node.attr[attribute].func]
            )
        ]
        # A node may also be the call of a function of its own name.
        return [name for name in [*names, node.op] if name in self._functions]

    def within(self, nodes: Sequence[tf.compat.v1.NodeDef]) -> Iterator[tf.compat.v1.NodeDef]:
        """The nodes, and those of all functions that they call, each function once."""
        seen: set[str] = set()
        todo: list[Sequence[tf.compat.v1.NodeDef]] = [nodes]
        while todo:
            for node in todo.pop():
                yield node
                for name in self.called(node):
                    if name not in seen:
                        seen.add(name)
                        todo.append(self._functions[name])


def surrounding_graphs(graph: tf.Graph) -> Iterator[tf.Graph]:
    """The graph, the graph around it, and so on up to the outermost."""
    current: tf.Graph | None = graph
    while current is not None:
        yield current
        current = getattr(current, "outer_graph", None)


def keep_alive(thing: object) -> None:
    """Holds an object with the function that is traced, and so the functions that it calls.

    A function of TF2 goes with its last Python reference; a TF1 graph has copies of its own.

    Args:
        thing: that knows functions which the graph calls.
    """
    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return
    for graph in surrounding_graphs(tf.compat.v1.get_default_graph()):
        # Around all functions is a graph that lives as long as the process.
        if getattr(graph, "building_function", False):
            graph.add_to_collection("pipemesh_functions", thing)


@contextlib.contextmanager
def results_beside_sources() -> Iterator[None]:
    """Functions that are traced inside return each result from where it was made.

    TensorFlow gives each result of a function an identity, without a device; in a function that
    spans several, they would all lie where it is called, and results go there and back. To be
    entered while a graph is built.
    """

    def beside(operation: tf.Operation) -> str:
        if operation.device or operation.type != "Identity":
            return operation.device
        return operation.inputs[0].device

    with tf.compat.v1.get_default_graph().device(beside):
        yield


@contextlib.contextmanager
def without_automatic_order() -> Iterator[None]:
    """Loops built inside have no order but the one that is given.

    In functions of TF2 a `Merge` would wait for all operations with state and all merges before it,
    on whatever devices, and results of a loop's body would get identities without a device.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    before = getattr(graph, "_add_control_dependencies", None)
    if not before:
        yield
        return
    graph._add_control_dependencies = False
    try:
        yield
    finally:
        graph._add_control_dependencies = before


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


@contextlib.contextmanager
def collected_graphs() -> Iterator[Any]:
    """Collects the graphs of TF2 functions that run for the first time inside.

    Yields:
        A `RunMetadata`, which is filled when the context ends.
    """
    metadata = tf.compat.v1.RunMetadata()
    eager = eager_context()
    eager.ensure_initialized()
    eager.enable_graph_collection()
    # What was collected before is none of ours.
    eager.export_run_metadata()
    try:
        yield metadata
        metadata.MergeFrom(eager.export_run_metadata())
    finally:
        eager.disable_graph_collection()


@functools.cache
def registered_kernels(kind: str) -> Sequence[Any]:
    """The `KernelDef` of each kernel of a kind of operations."""
    return list(kernels.get_registered_kernels_for_op(kind).kernel)
