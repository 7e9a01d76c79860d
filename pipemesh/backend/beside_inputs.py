"""Operations without a device, placed beside their inputs.

Autodiff forgets device scopes. In a graph of several devices its sums and reshapes would lie on the
default device. With workers that is the client, so every gradient would travel there and back.
"""

from __future__ import annotations

import tensorflow as tf

_LOOPS = ("While", "StatelessWhile")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def place_beside_inputs(graph: tf.Graph) -> None:
    """Gives each operation without a device that of its largest input, if that has one.

    Call it when the graph of a function is complete, inside of the function.

    Example:
        >>> @tf.function
        ... def doubled(x):
        ...     with tf.device("CPU:0"):
        ...         x = tf.identity(x)
        ...     y = x + x
        ...     place_beside_inputs(tf.compat.v1.get_default_graph())
        ...     return y
        >>> doubled.get_concrete_function(tf.constant(1.0)).graph.outputs[0].op.inputs[0].device
        '/device:CPU:0'
    """
    captured: dict[str, str] = {}
    for outside, inside in getattr(graph, "captures", ()):
        if outside.dtype == tf.resource and not tf.is_symbolic_tensor(outside):
            captured[inside.op.name] = outside.device
    # By name of a tensor, where it lies; "" if nothing says it. Operations come in order.
    lies: dict[str, str] = {}
    for operation in graph.get_operations():
        inputs = [lies.get(tensor.name, "") for tensor in operation.inputs]
        device = operation.device or captured.get(operation.name, "")
        is_call = operation.type in (*_LOOPS, *_CALLS)
        if not device and not is_call:
            sizes = [tensor.shape.num_elements() or 0 for tensor in operation.inputs]
            device = max(zip(sizes, inputs, strict=True), key=_size_if_placed, default=(0, ""))[1]
            if device and "_class" not in operation.node_def.attr:
                operation._set_device(device)
        for number, output in enumerate(operation.outputs):
            # What calls and loops return lies where it came in: those here hand tensors on.
            if is_call and len(inputs) == len(operation.outputs):
                device = inputs[number]
            lies[output.name] = device


def _size_if_placed(pair: tuple[int, str]) -> int:
    """Returns the size of an input; -1 if its device is unknown."""
    size, device = pair
    return size if device else -1
