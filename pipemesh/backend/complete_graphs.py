"""Complete graphs: changes by which a call sends less from device to device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# It is private; TensorFlow's version is pinned to 2.21.
from tensorflow.python.ops import handle_data_util

from pipemesh.backend.cluster import task_of
from pipemesh.backend.gradients import passes_on
from pipemesh.backend.graphs import drop_unused_captures
from pipemesh.backend.operation_kinds import CALLS, LOOPS


def place_beside_inputs(graph: tf.Graph, fed: str = "") -> None:
    """Gives each operation of a complete graph without a device that of its largest input; the
    graph is fed with tensors that lie on the device `fed`, if that is known.
    """
    # By name of a placeholder, where its tensor lies; "" if nothing says it.
    sources = {o.name: fed for o in graph.get_operations() if o.type == "Placeholder"}
    for outside, inside in getattr(graph, "captures", ()):
        is_handle = outside.dtype == tf.resource and not tf.is_symbolic_tensor(outside)
        sources[inside.op.name] = outside.device if is_handle else ""
    # By name of a tensor, where it lies; "" if nothing says it. Operations come in order.
    lies: dict[str, str] = {}
    for operation in graph.get_operations():
        inputs = [lies.get(tensor.name, "") for tensor in operation.inputs]
        device = operation.device or sources.get(operation.name, "")
        is_call = operation.type in LOOPS | CALLS
        if not device and not is_call:
            # Inputs whose device is unknown count less than any other.
            sizes = [
                (tensor.shape.num_elements() or 0) if place else -1
                for tensor, place in zip(operation.inputs, inputs, strict=True)
            ]
            device = inputs[sizes.index(max(sizes))] if sizes else ""
            if device and "_class" not in operation.node_def.attr:
                operation._set_device(device)
        for number, output in enumerate(operation.outputs):
            # What calls and loops return lies where it came in: those here hand tensors on.
            if is_call and len(inputs) == len(operation.outputs):
                device = inputs[number]
            lies[output.name] = device


def skip_passing_on(graph: tf.Graph) -> None:
    """Connects what uses the results of a call that only carried a gradient with its inputs.

    TensorFlow inlines the call, and places what has no device in it on this process.
    """
    for operation in graph.get_operations():
        if operation.type in CALLS and passes_on(operation.node_def):
            for result, source in zip(operation.outputs, operation.inputs, strict=True):
                _replace(result, source)


def pass_variables_as_one(graph: Any) -> None:
    """Passes the variables of each CPU of a worker to a graph as one tensor.

    A call sends the workers 114 bytes for each tensor that lies there, which for a model of a few
    hundred variables is most of what this process sends in a step. On GPUs TensorFlow packs none.
    """
    captured: dict[str, list[tuple[Any, tf.Tensor]]] = {}
    for outside, inside in graph.captures:
        is_handle = outside.dtype == tf.resource and task_of(outside.device) is not None
        if is_handle and tf.DeviceSpec.from_string(outside.device).device_type == "CPU":
            captured.setdefault(outside.device, []).append((outside, inside))
    for device, pairs in captured.items():
        with tf.init_scope(), tf.device(device):
            packed = tf.raw_ops.Pack(values=[outside for outside, _ in pairs], axis=0)
            # A worker answers before it has packed; the shape waits for it, and has its error.
            _ = packed.shape
        with tf.device(device):
            handles = tf.raw_ops.Unpack(value=graph.capture(packed), num=len(pairs), axis=0)
        for (_, inside), handle in zip(pairs, handles, strict=True):
            handle_data_util.copy_handle_data(inside, handle)
            _replace(inside, handle)
        drop_unused_captures(graph, {id(outside) for outside, _ in pairs})


def _replace(old: tf.Tensor, new: tf.Tensor) -> None:
    """Gives all operations that use a tensor another one instead."""
    for operation in old.consumers():
        for number, tensor in enumerate(operation.inputs):
            if tensor is old:
                operation._update_input(number, new)
