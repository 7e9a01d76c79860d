"""Checks of the devices that operations of a stage run on, before and after a step."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend.devices import agree, short_name
from pipemesh.backend.graphs import registered_kernels
from pipemesh.errors import DeviceError, PipelineError

# Placeholders of arguments are never executed.
_GIVEN = frozenset(["Placeholder", "_Arg", "_Retval"])


def check_devices(name: str, device: str, nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Raises a DeviceError if a replica of a stage has an operation for another device.

    The code of the stage may pin it there. Or TensorFlow has no kernel for the device's type and
    would run it on the CPU. A stage without a device is an error, too.
    """
    wanted = tf.DeviceSpec.from_string(device)
    if wanted.device_type is None:
        raise DeviceError(
            f"stage {name!r} has the device {device!r}, but strict_devices needs one with type "
            "and number, such as CPU:0"
        )
    for node in nodes:
        what = f"operation {node.name!r} ({node.op}) of stage {name!r}"
        if not agree(tf.DeviceSpec.from_string(node.device), wanted):
            raise DeviceError(
                f"strict_devices: {what} is pinned to {node.device}, but the stage is on "
                f"{device}; take tf.device out of the stage's code"
            )
        device_type, kernels = str(wanted.device_type), registered_kernels(node.op)
        if node.op in _GIVEN or any(
            kernel.device_type in (device_type, "DEFAULT")
            and all(_allows(constraint, node) for constraint in kernel.constraint)
            for kernel in kernels
        ):
            continue
        types = sorted({kernel.device_type for kernel in kernels} & {"CPU", "GPU", "TPU"})
        elsewhere = f"it would run on {types[0]}" if types else "no device can run it"
        raise DeviceError(
            f"strict_devices: {what} has no kernel for {device_type} with these types, so "
            f"{elsewhere}, but the stage is on {device}; use another operation or move it to a "
            "stage of its own"
        )


def _allows(constraint: Any, node: tf.compat.v1.NodeDef) -> bool:
    """Returns True if a kernel supports the dtype of a node."""
    if constraint.name not in node.attr:
        return True
    value = node.attr[constraint.name]
    types = value.list.type or [value.type]
    return set(types) <= set(constraint.allowed_values.list.type)


_SIZE = 4
# Rounding errors are far smaller, and errors of the kernel far larger.
_TOLERANCE = 0.05


def check_kernels(stage: str, device: str, nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Raises a PipelineError if this machine computes a matmul of a stage wrongly.

    oneDNN's `Einsum` with an ellipsis ignores a needed transposition, in float16, on CPUs with
    AVX512-FP16. Each equation is tried once, with a small product.
    """
    if tf.DeviceSpec.from_string(device).device_type not in (None, "CPU"):
        return
    half = tf.float16.as_datatype_enum
    for node in nodes:
        if node.op != "Einsum" or node.attr["T"].type != half:
            continue
        equation = node.attr["equation"].s.decode()
        if "..." in equation and einsum_error(equation) > _TOLERANCE:
            raise PipelineError(
                f"stage {stage!r} computes {node.name!r}, an einsum {equation!r}, in float16, "
                "which this CPU's kernel gets wrong; spell the dims instead of the ellipsis (such "
                "as 'abi,ij->abj'), or set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before "
                "TensorFlow starts; bfloat16 is computed rightly"
            )


@functools.cache
def einsum_error(equation: str) -> float:
    """Returns the error of a small product in float16 relative to its largest element."""
    names, result = equation.split("->")
    # For weights the ellipsis stands for no dims; for gradients it stands for the same dims on both
    # sides.
    operands = names.split(",")
    errors = [_error(equation, operands, result, set(range(len(operands))))]
    if "..." in result:
        errors.append(_error(equation, operands, result, {0}))
    return max(errors)


def _error(equation: str, names: list[str], result: str, batched: set[int]) -> float:
    spare = "".join([c for c in string.ascii_letters if c not in equation][:2])
    spelt = [n.replace("...", spare if i in batched else "") for i, n in enumerate(names)]
    has_spare = any(spare in name for name in spelt)
    wanted = f"{','.join(spelt)}->{result.replace('...', spare if has_spare else '')}"
    rng = np.random.default_rng(0)
    values = [rng.normal(size=[_SIZE] * len(name)).astype(np.float16) for name in spelt]
    # A separate session works in a function, a TF1 graph, and eagerly.
    with tf.Graph().as_default(), tf.device("CPU:0"):
        operands = [tf.compat.v1.placeholder(tf.float16, value.shape) for value in values]
        product = tf.raw_ops.Einsum(inputs=operands, equation=equation)
        with tf.compat.v1.Session() as session:
            computed = session.run(product, dict(zip(operands, values, strict=True)))
    exact = np.einsum(wanted, *(value.astype(np.float64) for value in values))
    return float(np.abs(computed - exact).max() / np.abs(exact).max())


_ACTION = re.compile(r"(?:^|/)action_(\d+)[FRBIW]\d*(?:/|$)")
# They are on the devices that tensors pass between, at both ends.
_TRANSFERS = frozenset(["_Send", "_Recv", "_HostSend", "_HostRecv"])
# Begin the names of nodes that TensorFlow adds where it inlines a function or cuts a loop.
_ADDED = ("Func/", "_cloop")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices on which the operations of each stage ran.

    Attributes:
        wanted: the devices of each stage, one per replica; a single device may be given as a
            string.
        found: for each stage, the number of operations of its actions by device.

    Example:
        >>> placement = Placement(("CPU:0", "CPU:1"), ({"CPU:0": 70}, {"CPU:1": 68, "CPU:0": 2}))
        >>> print(placement)
        stage 0 on CPU:0: 70 operations
        stage 1 on CPU:1: 68 operations, and 2 on CPU:0
        >>> placement.check()
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: 2 operations of stage 1 ran on CPU:0 instead of CPU:1
    """

    wanted: tuple[str | tuple[str, ...], ...]
    found: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, metadata: Any, devices: Sequence[str | Sequence[str]]) -> Placement:
        """Returns the placement of a step.

        Args:
            metadata: a `RunMetadata` with partition graphs: from `record_placement`, or from a TF1
                session's `run` with `RunOptions(output_partition_graphs=True)`.
            devices: the device of each stage, or the devices of its replicas, with type and number.

        Raises:
            DeviceError: the metadata holds no action of these stages.
        """
        wanted = tuple(tuple(map(short_name, _names(home))) for home in devices)
        found: list[collections.Counter[str]] = [collections.Counter() for _ in devices]
        for graph in metadata.partition_graphs:
            for node in graph.node:
                action = _ACTION.search(node.name)
                is_added = node.op in _TRANSFERS or node.name.startswith(_ADDED)
                if action is not None and not is_added:
                    found[int(action[1])][short_name(node.device)] += 1
        for stage, counts in enumerate(found):
            if not counts:
                raise DeviceError(
                    f"the metadata knows no operation of stage {stage}; record the first step of a "
                    "function, or give RunOptions(output_partition_graphs=True) to the session"
                )
        return cls(wanted, tuple(dict(counts) for counts in found))

    def check(self) -> None:
        """Checks that every stage ran on all of its devices and on no other.

        Raises:
            DeviceError: an operation ran on another device, or a replica did not run.
        """
        for stage, (wanted, counts) in enumerate(zip(self.wanted, self.found, strict=True)):
            names = ", ".join(_names(wanted))
            for device, count in counts.items():
                if device not in _names(wanted):
                    raise DeviceError(
                        f"{count} operations of stage {stage} ran on {device} instead of {names}"
                    )
            for device in _names(wanted):
                if device not in counts:
                    raise DeviceError(f"no operation of stage {stage} ran on {device}")

    def __str__(self) -> str:
        lines = []
        for stage, (wanted, counts) in enumerate(zip(self.wanted, self.found, strict=True)):
            expected = _names(wanted)
            numbers = " + ".join(str(counts.get(device, 0)) for device in expected)
            line = f"stage {stage} on {', '.join(expected)}: {numbers} operations"
            others = [f"{n} on {d}" for d, n in sorted(counts.items()) if d not in expected]
            lines.append(", and ".join([line, *others]))
        return "\n".join(lines)


def _names(home: str | Sequence[str]) -> Sequence[str]:
    return (home,) if isinstance(home, str) else home
