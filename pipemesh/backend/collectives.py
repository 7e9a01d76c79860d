"""Collective operations: TensorFlow's own, NCCL's between GPUs of one host, and those of TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

# Of collectives with groups and orders of one's own nothing is public, nor of the servers of other
# processes; the version is pinned to 2.21.
from tensorflow.python.ops import gen_collective_ops, nccl_ops

# Public ones are for whole tensors of a `tf.distribute` strategy alone; the version is pinned.
from tensorflow.python.tpu.ops import tpu_ops

from pipemesh.backend.devices import eager_context
from pipemesh.backend.operation_kinds import COLLECTIVES


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Who meets in one collective operation.

    Attributes:
        size: how many cores.
        group: the key of their group.
        instance: the key of the operation, the same on all of them.
        token: resource scalar that puts the operations of one core into one order.
    """

    size: int | tf.Tensor
    group: int | tf.Tensor
    instance: int | tf.Tensor
    token: tf.Tensor

    def arguments(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """What all collective operations take behind their input."""
        size, group, instance = (
            tf.convert_to_tensor(key, tf.int32) for key in (self.size, self.group, self.instance)
        )
        return size, group, instance, [self.token]


def reduce(x: tf.Tensor, meeting: Meeting, merge_op: str) -> tf.Tensor:
    """What all give, reduced by `"Add"`, `"Max"` or `"Min"`."""
    return gen_collective_ops.collective_reduce_v2(
        x, *meeting.arguments(), merge_op=merge_op, final_op="Id"
    )


def gather(x: tf.Tensor, meeting: Meeting) -> tf.Tensor:
    """What all give, joined in dim 0."""
    return gen_collective_ops.collective_gather_v2(x, *meeting.arguments())


def all_to_all(x: tf.Tensor, meeting: Meeting) -> tf.Tensor:
    """Row i of what all give goes to the core i of the group."""
    return gen_collective_ops.collective_all_to_all_v2(x, *meeting.arguments())


def send(x: tf.Tensor, meeting: Meeting) -> tf.Operation:
    """Gives a tensor to the other one of a group of two; nothing puts it into an order."""
    size, group, instance, _ = meeting.arguments()
    return gen_collective_ops.collective_bcast_send_v2(x, size, group, instance).op


def receive(like: tf.Tensor, meeting: Meeting) -> tf.Tensor:
    """What the other one of a group of two sends.

    Args:
        like: has its dtype and sizes.
        meeting: as of the other one.
    """
    size, group, instance, _ = meeting.arguments()
    found = gen_collective_ops.collective_bcast_recv_v2(
        size, group, instance, tf.shape(like), T=like.dtype
    )
    return tf.ensure_shape(found, like.shape)


def abort(why: str) -> None:
    """Fails all collectives of this process, those that wait and those to come.

    Args:
        why: what their errors say.
    """
    eager_context().abort_collective_ops(tf.errors.ABORTED, why)


def server() -> Any:
    """The `ServerDef` of the server through which others reach this process; None without one."""
    return eager_context()._collective_ops_server_def


def answers(task: str, seconds: float) -> bool:
    """Whether another process answers.

    Args:
        task: such as `/job:worker/replica:0/task:1`.
        seconds: to wait for it.
    """
    try:
        eager_context().check_collective_ops_peer_health(task, round(1000 * seconds))
    except tf.errors.OpError:
        return False
    return True


_NCCL_REDUCE: dict[str, Callable[[list[tf.Tensor]], list[tf.Tensor] | None]] = {
    "sum": nccl_ops.all_sum,
    "max": nccl_ops.all_max,
    "min": nccl_ops.all_min,
}
_NCCL_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def can_use_nccl(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> bool:
    """Whether NCCL applies: different GPUs of one task, and a dtype that it knows."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (
        all((spec.device_type or "").upper() == "GPU" for spec in specs)
        and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1
        and len({spec.device_index for spec in specs}) == len(specs)
        and tensors[0].dtype in _NCCL_DTYPES
    )


def nccl_all_reduce(
    tensors: Sequence[tf.Tensor], devices: Sequence[str], op: str
) -> list[tf.Tensor]:
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
    reduced = _NCCL_REDUCE[op](placed)
    assert reduced is not None
    return list(reduced)


def nccl_groups(nodes: Iterable[tf.compat.v1.NodeDef]) -> dict[str, list[str]]:
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


def rename_nccl_groups(nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
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


Groups = list[list[int]]


def tpu_all_sum(x: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Is one `CrossReplicaSum`.

    Args:
        x: floating, or int32 or uint32.
        groups: the numbers of the replicas that are summed up.
    """
    return tpu_ops.cross_replica_sum(x, groups)


def tpu_all_to_all(x: tf.Tensor, concat_dim: int, split_dim: int, groups: Groups) -> tf.Tensor:
    """Is one `AllToAll`.

    Args:
        x: is cut along `split_dim`, a part for each member of the group.
        concat_dim: that the parts which come in are joined in.
        split_dim: a multiple of the size of the groups.
        groups: the numbers of the replicas, all groups of one size.
    """
    return tpu_ops.all_to_all(x, concat_dim, split_dim, len(groups[0]), groups)


def tpu_permute(x: tf.Tensor, ends: Sequence[Sequence[int]]) -> tf.Tensor:
    """Is one `CollectivePermute`.

    Args:
        x: what is sent.
        ends: pairs of replicas, the source and the target; who is no target gets zeros.
    """
    return tpu_ops.collective_permute(x, tf.constant(ends, tf.int32, shape=[len(ends), 2]))
