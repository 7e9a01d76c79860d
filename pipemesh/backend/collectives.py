"""Collective operations: TensorFlow's own, NCCL's between GPUs of one host, and those of TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

# Collectives with custom groups and orders are not public, nor are the servers of other processes;
# the version is pinned to 2.21.
from tensorflow.python.ops import gen_collective_ops, nccl_ops

# The public ones only work on whole tensors in a `tf.distribute` strategy; the version is pinned.
from tensorflow.python.tpu.ops import tpu_ops

from pipemesh.backend.devices import eager_context
from pipemesh.backend.operation_kinds import COLLECTIVES
from pipemesh.backend.operations import on_each


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The group and the operation in which cores exchange tensors."""

    # The number of cores, the key of their group, and the key of the operation, equal on all cores.
    size: int | tf.Tensor
    group: int | tf.Tensor
    instance: int | tf.Tensor
    # A resource scalar that orders the operations of one core.
    token: tf.Tensor

    def arguments(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Returns the arguments after the input of each collective operation."""
        size, group, instance = (
            tf.convert_to_tensor(key, tf.int32) for key in (self.size, self.group, self.instance)
        )
        return size, group, instance, [self.token]


def reduce(x: tf.Tensor, meeting: Meeting, merge_op: str) -> tf.Tensor:
    """Returns the sum, maximum or minimum over the group (`"Add"`, `"Max"`, `"Min"`)."""
    return gen_collective_ops.collective_reduce_v2(
        x, *meeting.arguments(), merge_op=merge_op, final_op="Id"
    )


def gather(x: tf.Tensor, meeting: Meeting) -> tf.Tensor:
    """Returns the tensors of the group, concatenated in dim 0."""
    return gen_collective_ops.collective_gather_v2(x, *meeting.arguments())


def all_to_all(x: tf.Tensor, meeting: Meeting) -> tf.Tensor:
    """Sends row i of each core's tensor to core i of the group, and returns the received rows."""
    return gen_collective_ops.collective_all_to_all_v2(x, *meeting.arguments())


def abort(why: str) -> None:
    """Fails all collectives of this process, waiting and future ones, with this message."""
    eager_context().abort_collective_ops(tf.errors.ABORTED, why)


_NCCL_REDUCE: dict[str, Callable[[list[tf.Tensor]], list[tf.Tensor] | None]] = {
    "sum": nccl_ops.all_sum,
    "max": nccl_ops.all_max,
    "min": nccl_ops.all_min,
}
_NCCL_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def can_use_nccl(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> bool:
    """Returns whether NCCL applies: different physical GPUs of one task, and a supported dtype."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (
        all((spec.device_type or "").upper() == "GPU" for spec in specs)
        and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1
        and len({spec.device_index for spec in specs}) == len(specs)
        and tensors[0].dtype in _NCCL_DTYPES
        and not any(
            len(tf.config.get_logical_device_configuration(gpu) or ()) > 1
            for gpu in tf.config.list_physical_devices("GPU")
        )
    )


def nccl_all_reduce(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], op: str
) -> list[tf.Tensor]:
    """Returns the sum, maximum or minimum of tensors on GPUs, on each of the GPUs."""
    # NCCL operations are placed on the devices of their inputs.
    reduced = _NCCL_REDUCE[op](on_each(devices, tf.identity, tensors))
    assert reduced is not None
    return list(reduced)


def nccl_groups(nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, list[str]]:
    """Returns for each NCCL operation among nodes the names of its group, itself included."""
    members: dict[bytes, list[str]] = {}
    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.op in COLLECTIVES:
            groups[node.name] = members.setdefault(node.attr["shared_name"].s, [])
            groups[node.name].append(node.name)
    return groups


def rename_nccl_groups(nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Gives each NCCL group among nodes a unique name, in place."""
    # Operations of one group find each other by a shared name. If a graph is computed several times
    # in one step, each time needs a name of its own: otherwise two groups would mix.
    names: dict[bytes, bytes] = {}
    for node in nodes:
        if node.op in COLLECTIVES:
            old = node.attr["shared_name"].s
            if old not in names:
                # TensorFlow numbers its own names as well.
                names[old] = b"%s/%s" % (old, nccl_ops._get_shared_name().encode())
            node.attr["shared_name"].s = names[old]


Groups = list[list[int]]


def tpu_all_sum(x: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Returns the sum over groups of TPU replicas, by one `CrossReplicaSum`."""
    return tpu_ops.cross_replica_sum(x, groups)


def tpu_all_to_all(x: tf.Tensor, concat_dim: int, split_dim: int, groups: Groups) -> tf.Tensor:
    """Exchanges parts along one dim in equal groups, and joins them along another."""
    return tpu_ops.all_to_all(x, concat_dim, split_dim, len(groups[0]), groups)


def tpu_permute(x: tf.Tensor, ends: Sequence[Sequence[int]]) -> tf.Tensor:
    """Sends a tensor along pairs (source, target) of TPU replicas; other replicas get zeros."""
    return tpu_ops.collective_permute(x, tf.constant(ends, tf.int32, shape=[len(ends), 2]))
