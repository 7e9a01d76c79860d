"""XLA: which operations it has, whether it takes a function, and which functions are the same."""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.devices import eager_context
from pipemesh.backend.graphs import registered_kernels

# Stands for any message of TensorFlow's protocol buffers.
Message = Any


def _lowered(function: Any, device_type: str) -> None:
    """Lowers a concrete function to XLA's operations; raises an error of TensorFlow if it cannot.

    It does not compile them: that comes with the first call, and takes several times as long.
    """
    eager_context().ensure_initialized()
    if not tf.config.list_logical_devices(device_type):
        # Other processes may have such devices.
        device_type = "CPU"
    eager_context().get_compiler_ir(
        device_name=f"/device:{device_type}:0",
        platform_name=None,
        function_name=function.name,
        flat_args=[tf.TensorSpec(t.shape, t.dtype) for t in function.inputs],
        captured_inputs=[],
        stage="hlo",
    )


@functools.cache
def _register_kernels() -> None:
    """Makes TensorFlow register XLA's kernels, which it does when XLA is first used."""
    with tf.init_scope():
        one = tf.function(tf.identity, autograph=False).get_concrete_function(tf.TensorSpec([]))
        _lowered(one, "CPU")


@functools.cache
def has_compiled_kernel(op: str, device_type: str) -> bool:
    """Returns whether XLA has operations of a type, on devices of a type."""
    _register_kernels()
    kinds = {kernel.device_type for kernel in registered_kernels(op)}
    # An operation without any kernel calls a function, or is an argument.
    return f"XLA_{device_type}_JIT" in kinds or not kinds


def _register_inner(function: Any) -> None:
    """Makes the functions that an imported graph brought along known, as long as `function` is."""
    context = eager_context()
    for inner in function.graph.as_graph_def().library.function:
        # TensorFlow counts additions, and drops a function after as many removals.
        context.add_function_def(inner)
        forget = weakref.finalize(function, context.remove_function, inner.signature.name)
        forget.atexit = False


def why_not_compiled(function: Any, device_type: str) -> str | None:
    """Returns why XLA does not take a concrete function without captures; None if it does."""
    _register_inner(function)
    try:
        _lowered(function, device_type)
    except (tf.errors.OpError, ValueError) as error:
        return " ".join(str(error).split())[:500]
    return None


def prepare_for_xla(graph_def: Message) -> None:
    """Changes a serialized graph, functions included, so that XLA takes it, in place."""
    functions = graph_def.library.function
    # TensorFlow would go on with a function that it knows by its name.
    names = {f.signature.name: f"{f.signature.name}_compiled" for f in functions}
    for function in functions:
        function.signature.name = names[function.signature.name]
    for pair in graph_def.library.gradient:
        pair.function_name = names.get(pair.function_name, pair.function_name)
        pair.gradient_func = names.get(pair.gradient_func, pair.gradient_func)
    for node in itertools.chain(graph_def.node, *(f.node_def for f in functions)):
        node.device = ""
        node.op = names.get(node.op, node.op)
        # A TF1 session would make branches and loops of operations that XLA does not have.
        node.attr.pop("_lower_using_switch_merge", None)
        for value in node.attr.values():
            called = [value.func] if value.WhichOneof("value") == "func" else value.list.func
            for each in called:
                each.name = names.get(each.name, each.name)


def fingerprint(function: Any) -> str:
    """Returns the same text for concrete functions that compute the same, whatever names they use.

    It is made of results and what they need: the order of operations does not matter, nor do
    operations that only check or print.
    """
    graph_def = function.graph.as_graph_def()
    known = {f.signature.name: f for f in graph_def.library.function}

    @functools.cache
    def called(name: str) -> str:
        inner = known[name]
        arguments = [argument.name for argument in inner.signature.input_arg]
        results = [inner.ret[result.name] for result in inner.signature.output_arg]
        return _hash(_values(inner.node_def, arguments, results, text_of))

    def text_of(key: str, value: Message) -> object:
        """Returns an attribute without names of functions."""
        names = [each.name for each in [value.func, *value.list.func] if each.name in known]
        return key, [*map(called, names)] if names else value.SerializeToString(deterministic=True)

    arguments = [(t.dtype.name, t.shape.as_list()) for t in function.inputs]
    names = [t.op.name for t in function.inputs]
    results = [t.name for t in function.outputs]
    return _hash([arguments, _values(graph_def.node, names, results, text_of)])


def _values(
    nodes: Sequence[Message],
    arguments: Sequence[str],
    results: Sequence[str],
    text_of: Callable[[str, Message], object],
) -> list[str]:
    """Returns for each result a text that says how it is computed."""
    known = {name: str(number) for number, name in enumerate(arguments)}
    by_name = {node.name: node for node in nodes}
    # Nodes that pass their input on.
    same: set[str] = set()

    def value(source: str) -> str:
        name, *rest = source.lstrip("^").split(":")
        if name not in known:
            add(by_name[name])
        if name in same and source[0] != "^":
            return known[name]
        # The first output has a number in some places, and none in others.
        return _hash([source[0] == "^", known[name], [r for r in rest if r != "0"]])

    def add(node: Message) -> None:
        if node.op == "Identity" and len(node.input) == 1:
            same.add(node.name)
            known[node.name] = value(node.input[0])
            return
        attributes = [text_of(k, v) for k, v in sorted(node.attr.items()) if k[0] != "_"]
        known[node.name] = _hash([node.op, [*map(value, node.input)], attributes])

    # Most nodes come after what they need; else Python might recurse too deeply.
    for node in nodes:
        if node.name not in known:
            add(node)
    return [*map(value, results)]


def _hash(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()
