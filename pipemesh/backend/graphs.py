"""Graphs of functions: their calls, the graph being traced, and those that TensorFlow runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Only these private modules know function attributes of operations, loops and kernels; the version
# is pinned to 2.21.
from tensorflow.python.eager import execute
from tensorflow.python.framework import kernels, op_def_registry, ops
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)

from pipemesh.backend.devices import eager_context


@functools.cache
def _attributes(kind: str) -> tuple[tuple[str, bool], ...]:
    """Returns the function attributes of an operation, and whether each is a list of functions."""
    definition = op_def_registry.get(kind)
    if definition is None:
        return ()
    return tuple(
        (attribute.name, attribute.type == "list(func)")
        for attribute in definition.attr
        if attribute.type in ("func", "list(func)")
    )


def called_functions(graph: tf.Graph, operation: tf.Operation) -> Iterator[tf.Graph]:
    """Yields the graphs of the functions that an operation calls, in attribute order."""
    for definition in called_definitions(graph, operation):
        if getattr(definition, "graph", None) is not None:
            yield definition.graph


def operations_within(
    graph: tf.Graph, inside: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], tf.Operation]]:
    """Yields all operations of a graph and its functions, each with the names of these."""
    seen: set[int] = set()
    for operation in graph.get_operations():
        yield inside, operation
        for function in called_functions(graph, operation):
            if id(function) not in seen:
                seen.add(id(function))
                yield from operations_within(function, (*inside, function.name))


def needed_operations(graph: tf.Graph, results: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Returns the operations that compute results, in order, without arguments and captures."""
    # The inputs of a function are placeholders.
    needed, todo = {tensor.op.name for tensor in results}, [tensor.op for tensor in results]
    while todo:
        for tensor in todo.pop().inputs:
            if tensor.op.name not in needed:
                needed.add(tensor.op.name)
                todo.append(tensor.op)
    return [op for op in graph.get_operations() if op.name in needed and op.type != "Placeholder"]


def copied_operation(operation: tf.Operation, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Computes an operation of another graph in the current one, of other inputs.

    Tapes record it, unless it calls functions.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    for function in called_definitions(operation.graph, operation):
        graph._add_function_recursive(function)
    attributes = {
        name: value
        for name, value in operation.node_def.attr.items()
        if name not in ("_class", "_output_shapes")
    }
    copy = graph.create_op(
        operation.type,
        list(inputs),
        [tensor.dtype for tensor in operation.outputs],
        name=operation.name,
        attrs=attributes,
    )
    outputs = list(copy.outputs)
    if not _attributes(operation.type) and execute.must_record_gradient():
        # As the functions do that TensorFlow generates for its operations.
        names = [attribute.name for attribute in operation.op_def.attr]
        values = [part for name in names for part in (name, copy.get_attr(name))]
        execute.record_gradient(operation.type, list(inputs), tuple(values), outputs)
    return outputs


def called_definitions(graph: Any, operation: tf.Operation) -> Iterator[Any]:
    """Yields the definitions of the functions that an operation calls."""
    for attribute, several in _attributes(operation.type):
        value = operation.get_attr(attribute)
        for function in value if several else [value]:
            definition = graph._get_function(function.name)
            if definition is not None:
                yield definition


def gradient_owner(operation: tf.Operation) -> str | None:
    """Returns the module and name of the function that is the custom gradient of an operation."""
    name = operation.node_def.attr["_gradient_op_type"].s.decode()
    if not name:
        return None
    function: Any = ops.gradient_registry.lookup(name)
    # TensorFlow registers a function around it.
    for inner in ("tape_grad_fn", "grad_fn"):
        names = function.__code__.co_freevars
        if inner in names:
            function = function.__closure__[names.index(inner)].cell_contents
    return f"{function.__module__}.{function.__qualname__}"


class Bodies:
    """The functions of a serialized graph, as lists of nodes."""

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._functions = {f.signature.name: f for f in graph_def.library.function}

    def called(self, node: tf.compat.v1.NodeDef) -> list[str]:
        """Returns the names of the functions that a node calls."""
        names = [
            function.name
            for attribute, several in _attributes(node.op)
            for function in (
                node.attr[attribute].list.func if several else [node.attr[attribute].func]
            )
        ]
        # A node may also call a function named as its type.
        return [name for name in [*names, node.op] if name in self._functions]

    def returns_argument(self, function: str, number: int) -> bool:
        """Returns True if a function returns the argument of the same number unchanged."""
        definition = self._functions[function]
        nodes = {node.name: node for node in definition.node_def}
        name = definition.ret[definition.signature.output_arg[number].name].partition(":")[0]
        while name in nodes and nodes[name].op == "Identity":
            name = nodes[name].input[0].partition(":")[0]
        return name == definition.signature.input_arg[number].name

    def within(self, nodes: Sequence[tf.compat.v1.NodeDef]) -> Iterator[tf.compat.v1.NodeDef]:
        """Yields the nodes, and those of all functions that they call, each function once."""
        seen: set[str] = set()
        todo: list[Sequence[tf.compat.v1.NodeDef]] = [nodes]
        while todo:
            for node in todo.pop():
                yield node
                for name in self.called(node):
                    if name not in seen:
                        seen.add(name)
                        todo.append(self._functions[name].node_def)


def surrounding_graphs(graph: tf.Graph | None) -> Iterator[tf.Graph]:
    """Yields the graph, the graph around it, and so on up to the outermost."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def keep_alive(thing: object) -> None:
    """Keeps an object, and the functions that it holds, alive with the function being traced."""
    # A function of TF2 is deleted with its last Python reference; a TF1 graph has copies of its
    # own.
    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return
    for graph in surrounding_graphs(tf.compat.v1.get_default_graph()):
        # The outermost graph lives as long as the process.
        if getattr(graph, "building_function", False):
            graph.add_to_collection("pipemesh_functions", thing)


@contextlib.contextmanager
def results_beside_sources() -> Iterator[None]:
    """Makes functions traced inside return each result on the device that computed it."""
    # TensorFlow gives each result of a function an identity without a device. In a function that
    # spans several devices, all results would lie on the caller's device and travel there and back.
    # Enter it while a graph is built.

    def beside(operation: tf.Operation) -> str:
        if operation.device or operation.type != "Identity":
            return operation.device
        return operation.inputs[0].device

    with tf.compat.v1.get_default_graph().device(beside):
        yield


@contextlib.contextmanager
def without_automatic_order() -> Iterator[None]:
    """Builds loops inside without the automatic order of operations."""
    # In functions of TF2 a `Merge` would wait for all stateful operations and all merges before it,
    # on any device, and results of a loop's body would get identities without a device.
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
    """Returns the iteration of a `tf.while_loop` if a graph is one of its functions, else None."""
    if isinstance(graph, (WhileBodyFuncGraph, WhileCondFuncGraph)):
        # The first argument of both functions counts the iterations.
        return graph.get_operations()[0].outputs[0]
    return None


def is_in_old_loop() -> bool:
    """Returns whether operations are being added to a TF1 loop of the old kind."""
    graph: Any = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    return context is not None and context.IsWhileContext()


@contextlib.contextmanager
def reads_replaced(replace: Callable[[Any, tf.DType], tf.Tensor]) -> Iterator[None]:
    """Replaces reads of outside variables in the graph being traced."""
    # `replace` takes the outside handle and the dtype and returns the outside tensor to use
    # instead. Only the graph itself is affected: a branch or a loop inside it has a graph of its
    # own. All operations are added through this method, which is private.
    graph: Any = tf.compat.v1.get_default_graph()
    create = graph._create_op_internal

    def create_or_capture(kind: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "ReadVariableOp":
            # Handles of eager variables are captured at this point, those of graphs are not.
            outer = next((o for o, inner in graph.captures if inner is inputs[0]), inputs[0])
            if getattr(outer, "graph", None) is not graph:
                # A placeholder: its operation has the value as output.
                value = replace(outer, tf.as_dtype(kwargs["attrs"]["dtype"].type))
                return graph.capture(value).op
        return create(kind, inputs, *args, **kwargs)

    graph._create_op_internal = create_or_capture
    try:
        yield
    finally:
        del graph._create_op_internal


@contextlib.contextmanager
def imports_by_device() -> Iterator[None]:
    """Imports nodes without colocation faster: enters the scope of each device once."""
    # `tf.graph_util.import_graph_def` enters it for each node, which takes longer than all else
    # that it does.
    graph: Any = tf.compat.v1.get_default_graph()
    add = graph._add_new_tf_operations

    def add_and_place(compute_devices: bool) -> list[tf.Operation]:
        of_device: dict[str, list[Any]] = {}
        for operation in add(compute_devices=compute_devices):
            of_device.setdefault(operation.device, []).append(operation)
        # A function of the scopes around may place those without a device beside others.
        for device in sorted(of_device, reverse=True):
            with tf.device(device) if device else contextlib.nullcontext():
                for operation in of_device[device]:
                    operation._set_device("")
                    graph._apply_device_functions(operation)
        return []

    graph._add_new_tf_operations = add_and_place
    try:
        yield
    finally:
        del graph._add_new_tf_operations


def drop_unused_captures(graph: tf.Graph, ids: Container[int]) -> None:
    """Removes unused captures from a graph being traced, among outside tensors of these `id`s."""
    for outer, inner in list(graph.captures):
        if id(outer) in ids and not inner.consumers():
            graph._function_captures.pop(id(outer))


@contextlib.contextmanager
def record_placement() -> Iterator[Any]:
    """Records the graphs of TF2 functions that run for the first time inside the context.

    TensorFlow reports a graph when it places it, which it does once. Later steps record nothing.

    Yields:
        A `RunMetadata`, which is filled when the context ends.
    """
    metadata = tf.compat.v1.RunMetadata()
    eager = eager_context()
    eager.ensure_initialized()
    eager.enable_graph_collection()
    # Discard graphs collected earlier.
    eager.export_run_metadata()
    try:
        yield metadata
    except tf.errors.OpError:
        # TensorFlow collects the graphs of a function that fails with the next operation.
        with contextlib.suppress(tf.errors.OpError), tf.device("CPU:0"):
            tf.raw_ops.NoOp()
        raise
    finally:
        try:
            # A function's graphs are reported once, also if its first run fails.
            metadata.MergeFrom(eager.export_run_metadata())
        finally:
            eager.disable_graph_collection()


@functools.cache
def registered_kernels(kind: str) -> Sequence[Any]:
    """Returns the `KernelDef` of each kernel of an operation type."""
    return list(kernels.get_registered_kernels_for_op(kind).kernel)
