"""All-reduce between the GPUs of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.ops import nccl_ops

_REDUCE: dict[str, Callable[[list[tf.Tensor]], list[tf.Tensor]]] = {
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
    return list(_REDUCE[op](placed))
