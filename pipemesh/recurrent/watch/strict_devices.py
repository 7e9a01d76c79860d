"""Checks, before anything runs, that every operation of a stage can run on the stage's device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from pipemesh.backend.devices import agree
from pipemesh.backend.graphs import registered_kernels
from pipemesh.errors import DeviceError

# Placeholders of arguments are never executed.
_GIVEN = frozenset(["Placeholder", "_Arg", "_Retval"])


def check_devices(name: str, device: str, nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Raises a DeviceError if a replica of a stage has an operation for another device.

    The code of the stage may pin it there. Or TensorFlow has no kernel for the device's type and
    would run it on the CPU. A stage without a device is an error, too. `nodes` are all nodes of the
    replica, forward and backward.
    """
    wanted = tf.DeviceSpec.from_string(device)
    if wanted.device_type is None:
        raise DeviceError(
            f"stage {name!r} has the device {device!r}, but strict_devices needs one with type "
            "and number, such as CPU:0"
        )
    for node in nodes:
        _check_node(node, name, device, wanted)


def _check_node(node: tf.compat.v1.NodeDef, stage: str, device: str, wanted: tf.DeviceSpec) -> None:
    what = f"operation {node.name!r} ({node.op}) of stage {stage!r}"
    if not agree(tf.DeviceSpec.from_string(node.device), wanted):
        raise DeviceError(
            f"strict_devices: {what} is pinned to {node.device}, but the stage is on {device}; "
            "take tf.device out of the stage's code"
        )
    device_type = str(wanted.device_type)
    if node.op in _GIVEN or _has_kernel(node, device_type):
        return
    types = sorted(
        {kernel.device_type for kernel in registered_kernels(node.op)} & {"CPU", "GPU", "TPU"}
    )
    elsewhere = f"it would run on {types[0]}" if types else "no device can run it"
    raise DeviceError(
        f"strict_devices: {what} has no kernel for {device_type} with these types, so "
        f"{elsewhere}, but the stage is on {device}; use another operation or move it to a stage "
        "of its own"
    )


def _has_kernel(node: tf.compat.v1.NodeDef, device_type: str) -> bool:
    return any(
        kernel.device_type in (device_type, "DEFAULT")
        and all(_allows(constraint, node) for constraint in kernel.constraint)
        for kernel in registered_kernels(node.op)
    )


def _allows(constraint: Any, node: tf.compat.v1.NodeDef) -> bool:
    """Returns True if a kernel supports the dtype of a node."""
    if constraint.name not in node.attr:
        return True
    value = node.attr[constraint.name]
    types = value.list.type or [value.type]
    return set(types) <= set(constraint.allowed_values.list.type)
