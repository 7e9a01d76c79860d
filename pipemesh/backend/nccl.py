"""All-reduce between the GPUs of one host.

Operations of one group find each other by a name that they share. Where a graph is computed several
times in one step, each time needs a name of its own: else two of them would meet half and half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf
from tensorflow.python.ops import nccl_ops

from pipemesh.backend.operation_kinds import COLLECTIVES

_REDUCE: dict[str, Callable[[list[tf.Tensor]], list[tf.Tensor] | None]] = {
    "sum": nccl_ops.all_sum,
    "max": nccl_ops.all_max,
    "min": nccl_ops.all_min,
}
_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def can_reduce(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> bool:
    """Whether NCCL applies: different GPUs of one task, and a dtype that it knows."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (
        all((spec.device_type or "").upper() == "GPU" for spec in specs)
        and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1
        and len({spec.device_index for spec in specs}) == len(specs)
        and tensors[0].dtype in _DTYPES
    )


def all_reduce(tensors: Sequence[tf.Tensor], devices: Sequence[str], op: str) -> list[tf.Tensor]:
    """Reduces tensors that lie on GPUs; each gets the result.

    Args:
        tensors: one for each device, of one shape and dtype.
        devices: their devices.
        op: `"sum"`, `"max"` or `"min"`.
    """
    placed: list[tf.Tensor] = []
    for tensor, device in zip(tensors, devices, strict=True):
        # NCCL's operations are placed where their inputs say that they lie.
        with tf.device(device):
            placed.append(tf.identity(tensor))
    reduced = _REDUCE[op](placed)
    assert reduced is not None
    return list(reduced)


def groups(nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, list[str]]:
    """The collective operations among nodes, each with those of its group, itself included.

    Args:
        nodes: `NodeDef`s.
    """
    found: dict[bytes, list[str]] = {}
    of_node: dict[str, list[str]] = {}
    for node in nodes:
        if node.op in COLLECTIVES:
            of_node[node.name] = found.setdefault(node.attr["shared_name"].s, [])
            of_node[node.name].append(node.name)
    return of_node


def rename(nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Gives each group of collective operations among nodes a name that no other group has.

    Args:
        nodes: `NodeDef`s, changed in place.
    """
    names: dict[bytes, bytes] = {}
    for node in nodes:
        if node.op in COLLECTIVES:
            old = node.attr["shared_name"].s
            if old not in names:
                # TensorFlow's own names are numbered, too.
                names[old] = b"%s/%s" % (old, nccl_ops._get_shared_name().encode())
            node.attr["shared_name"].s = names[old]
