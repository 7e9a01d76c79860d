"""TensorFlow's collective operations, of one process or many, and who can be reached by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

# Of collectives with groups and orders of one's own nothing is public, nor of the servers of other
# processes; the version is pinned to 2.21.
from tensorflow.python.ops import gen_collective_ops

from pipemesh.backend.eager_context import eager_context


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
