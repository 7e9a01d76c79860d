"""The operations by which the cores of a TPU talk to each other."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Public ones are for whole tensors of a `tf.distribute` strategy alone; the version is pinned.
from tensorflow.python.tpu.ops import tpu_ops

Groups = list[list[int]]


def all_sum(x: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Is one `CrossReplicaSum`.

    Args:
        x: floating, or int32 or uint32.
        groups: the numbers of the replicas that are summed up.
    """
    return tpu_ops.cross_replica_sum(x, groups)


def all_to_all(x: tf.Tensor, concat_dim: int, split_dim: int, groups: Groups) -> tf.Tensor:
    """Is one `AllToAll`.

    Args:
        x: is cut along `split_dim`, a part for each member of the group.
        concat_dim: that the parts which come in are joined in.
        split_dim: a multiple of the size of the groups.
        groups: the numbers of the replicas, all groups of one size.
    """
    return tpu_ops.all_to_all(x, concat_dim, split_dim, len(groups[0]), groups)


def permute(x: tf.Tensor, ends: Sequence[Sequence[int]]) -> tf.Tensor:
    """Is one `CollectivePermute`.

    Args:
        x: what is sent.
        ends: pairs of replicas, the source and the target; who is no target gets zeros.
    """
    return tpu_ops.collective_permute(x, tf.constant(ends, tf.int32, shape=[len(ends), 2]))
