"""Gives tensors a gradient of one's own, without moving them to another device."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_functional_ops

from pipemesh.backend.gradient import without_colocation
from pipemesh.backend.kept_gradients import register
from pipemesh.backend.tapes import record_call, unrecorded

Grads = Sequence[tf.Tensor | None]
_numbers = itertools.count()
# In the names that TensorFlow gives the function's graphs.
_NAME = "__pipemesh_passes_on_"
_GRADIENT = "PipemeshGradient"
_unneeded = contextvars.ContextVar("pipemesh_no_gradients", default=False)


@contextlib.contextmanager
def no_gradients() -> Iterator[None]:
    """Nothing is attached inside: what is computed there is not differentiated.

    Each gradient of one's own takes an operation that does nothing but carry it.

    Example:
        >>> x = tf.constant([3.0])
        >>> with no_gradients():
        ...     (y,) = attach_gradient([2 * x], [x], lambda grads: grads, False)
        >>> float(y[0])
        6.0
    """
    token = _unneeded.set(True)
    try:
        yield
    finally:
        _unneeded.reset(token)


@tf.function(autograph=False)
def _pipemesh_passes_on(*tensors: tf.Tensor) -> list[tf.Tensor]:
    return [tf.identity(tensor) for tensor in tensors]


def passes_on(node: Any) -> bool:
    """Whether a node of a graph hands each of its inputs on, so that it had a gradient of its own.

    Once the graph is differentiated, whoever takes its outputs may as well take its inputs.

    Args:
        node: a `NodeDef`.
    """
    return node.op == "PartitionedCall" and _NAME in node.attr["f"].func.name


def had_gradient(node: Any) -> bool:
    """Whether a node of a graph, on one device, hands its inputs on and had a gradient of its own.

    Args:
        node: a `NodeDef`.
    """
    gradient = node.attr["_gradient_op_type"].s if "_gradient_op_type" in node.attr else b""
    return node.op == "IdentityN" and gradient.startswith(_GRADIENT.encode())


def attach_gradient(
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[[list[tf.Tensor]], Grads],
    across_devices: bool,
) -> list[tf.Tensor]:
    """Returns `outputs`, through which gradients flow to `inputs` only as `backward` says.

    `tf.custom_gradient` passes all that it differentiates through one `IdentityN`, which would
    copy the tensors of all devices to one. A call of a function does not: it is inlined before
    operations are placed, and each tensor stays where it is.

    Args:
        outputs: floating tensors.
        inputs: floating tensors.
        backward: takes one gradient for each output; returns one or None for each input. It is
            called outside of any colocation; across devices it has to enter device scopes itself,
            otherwise it is called in that of the first output.
        across_devices: whether the tensors lie on different devices.
    """
    if _unneeded.get():
        return list(outputs)
    number = len(outputs)
    tensors = [*outputs, *inputs]

    def input_grads(*grads: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | None]:
        # Autodiff is in no scope, or in that of another device.
        beside = contextlib.nullcontext() if across_devices else tf.device(outputs[0].device)
        with without_colocation(), beside:
            # Gradients of lookups are sparse; communication is dense.
            return list(backward([tf.convert_to_tensor(grad) for grad in grads[:number]]))

    if tf.executing_eagerly():
        with unrecorded():
            results = [_identity_in_place(tensor) for tensor in outputs]
        record_call(results, inputs, input_grads)
        return results

    def all_grads(*grads: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor | None]:
        return [None] * number + input_grads(*grads)

    name = f"{_GRADIENT}{next(_numbers)}"
    graph = tf.compat.v1.get_default_graph()
    register(name, lambda _, *grads: all_grads(*grads), graph)
    kind = "PartitionedCall" if across_devices else "IdentityN"
    with graph.gradient_override_map({kind: name}), unrecorded():
        if across_devices:
            results = _call_pass_on(graph, tensors)
        else:
            with tf.device(outputs[0].device):
                results = tf.identity_n(tensors)
    record_call(results, tensors, all_grads)
    return results[:number]


def _identity_in_place(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.identity(tensor)


def _call_pass_on(graph: tf.Graph, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    # A shape may be None, whatever is declared.
    specs = [
        tf.TensorSpec(None, tensor.dtype)  # pyright: ignore[reportArgumentType]
        for tensor in tensors
    ]
    function = _pipemesh_passes_on.get_concrete_function(*specs)
    function.add_to_graph(graph)
    results = gen_functional_ops.partitioned_call(
        tensors,
        [tensor.dtype for tensor in tensors],
        tf.compat.v1.NameAttrList(name=function.name),
    )
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return list(results)
