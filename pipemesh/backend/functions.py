"""The functions that operations call, in graphs that live and in graphs written down."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# The only place that knows which attributes of operations are functions.
from tensorflow.python.framework import op_def_registry


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
        self._definitions = {f.signature.name: f for f in graph_def.library.function}

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

    def returns_argument(self, function: str, number: int) -> bool:
        """Returns True if a function returns the argument of the same number unchanged."""
        definition = self._definitions[function]
        nodes = {node.name: node for node in definition.node_def}
        name = definition.ret[definition.signature.output_arg[number].name].partition(":")[0]
        while name in nodes and nodes[name].op == "Identity":
            name = nodes[name].input[0].partition(":")[0]
        return name == definition.signature.input_arg[number].name

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
