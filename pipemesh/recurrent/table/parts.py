"""The rows of the whole batch that are a microbatch's, where its number is known only late."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.traced_stage import Cutting


def parts(
    tensors: Sequence[tf.Tensor | None], microbatch: tf.Tensor, cutting: Cutting
) -> list[tf.Tensor | None]:
    """The parts of a whole batch's tensors that are a microbatch's, replica by replica.

    Args:
        tensors: for the whole batch.
        microbatch: int64 scalar.
        cutting: how the batch is cut.
    """
    replicas = cutting.replicas
    numbers = [microbatch]
    if replicas > 1:
        numbers = [microbatch * replicas + replica for replica in range(replicas)]
    return [None if t is None else _part(t, n, cutting) for n in numbers for t in tensors]


def _part(tensor: tf.Tensor, number: tf.Tensor, cutting: Cutting) -> tf.Tensor:
    dim, size = cutting.batch_dim, cutting.part_size
    shape = static_sizes(tensor)
    begin = tf.one_hot(dim, len(shape), number * size, tf.constant(0, tf.int64))
    shape[dim] = size
    part = tf.slice(tensor, begin, tf.constant(shape, tf.int64))
    part.set_shape(shape)
    return part
