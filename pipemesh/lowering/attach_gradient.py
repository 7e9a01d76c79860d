"""Gives tensors a gradient of one's own, without moving them to another device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import record
from tensorflow.python.framework import ops
from tensorflow.python.ops import array_ops, gen_functional_ops, gradients_util

from pipemesh.lowering.captures import call_local

Grads = Sequence[Any]
# Several tapes watch, or one that may be asked more than once.
_HIGHER_ORDER = gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER
_numbers = itertools.count()


@tf.function(autograph=False)
def _pass_on(*tensors: tf.Tensor) -> list[tf.Tensor]:
    return [tf.identity(tensor) for tensor in tensors]


def attach_gradient(
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[[Grads], Grads],
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
            called outside of any colocation and has to enter device scopes itself.
        across_devices: whether the tensors lie on different devices.
    """
    number = len(outputs)
    tensors = [*outputs, *inputs]

    def input_grads(*grads: Any) -> list[Any]:
        # `tf.gradients` wants all operations to lie with the one that is differentiated.
        graph = tf.compat.v1.get_default_graph()
        with graph.colocate_with(None, ignore_existing=True):
            # Gradients of lookups are sparse; communication is dense.
            return list(backward([tf.convert_to_tensor(grad) for grad in grads[:number]]))

    if tf.executing_eagerly():
        with record.stop_recording():
            results = [_identity_in_place(tensor) for tensor in outputs]
        record.record_operation("pipemesh", results, list(inputs), input_grads)
        return results

    def all_grads(*grads: Any) -> list[Any]:
        return [None] * number + input_grads(*grads)

    name = f"PipemeshGradient{next(_numbers)}"
    ops.RegisterGradient(name)(lambda _, *grads: all_grads(*grads))
    graph = tf.compat.v1.get_default_graph()
    kind = "PartitionedCall" if across_devices else "IdentityN"
    with graph.gradient_override_map({kind: name}), record.stop_recording():
        if across_devices:
            results = _call_pass_on(graph, tensors)
        else:
            results = array_ops.identity_n(tensors)
    record.record_operation("pipemesh", results, tensors, all_grads)
    return results[:number]


def _identity_in_place(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.identity(tensor)


def _call_pass_on(graph: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    specs = [tf.TensorSpec(None, tensor.dtype) for tensor in tensors]
    function = _pass_on.get_concrete_function(*specs)
    function.add_to_graph(graph)
    results = gen_functional_ops.partitioned_call(
        tensors,
        [tensor.dtype for tensor in tensors],
        attr_value_pb2.NameAttrList(name=function.name),
    )
    for result, tensor in zip(results, tensors, strict=True):
        result.set_shape(tensor.shape)
    return list(results)


def local_gradient(
    function: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor], device: str
) -> tf.Tensor:
    """Calls a function on a device, where its gradient will be computed as well.

    Autodiff forgets device scopes: all gradients would be computed on the first device. In eager
    mode nothing is done about it.

    Args:
        function: of tensors, without side effects; may not use tensors that are no arguments.
        tensors: its arguments.
        device: where.

    Raises:
        GradientError: it uses a tensor or variable whose gradient would be lost.
    """
    with tf.device(device):
        if tf.executing_eagerly():
            return call_local(function, tensors)
        # Through identities, so that an argument that occurs twice, or that was computed from
        # another one, is an argument of its own. A second derivative is one of what is computed
        # here from the identities, so tapes that may ask for one follow them.
        higher = gradients_util.PossibleTapeGradientTypes(list(tensors)) == _HIGHER_ORDER
        with contextlib.nullcontext() if higher else record.stop_recording():
            args = [tf.identity(tensor) for tensor in tensors]
        floating = [i for i, arg in enumerate(args) if arg.dtype.is_floating]
        sources = [args[i] for i in floating]
        # A tape of its own knows what is local. `tf.gradients` would look at all that follows, for
        # each function again; other tapes do not watch the identities, and record nothing.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(sources)
            output = call_local(function, args)
        if not output.dtype.is_floating or not floating:
            return output

        def backward(grads: Grads) -> Grads:
            with tf.device(device):
                return tape.gradient(output, sources, list(grads))

        inputs = [tensors[i] for i in floating]
        return attach_gradient([output], inputs, backward, across_devices=False)[0]
