"""The part of the whole batch that a piece is, where its number is known only late."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.cutting import Cutting


def parts(
    tensors: Sequence[tf.Tensor | None], piece: tf.Tensor, cutting: Cutting
) -> list[tf.Tensor | None]:
    """The parts of a whole batch's tensors that are a piece's, replica by replica.

    Args:
        tensors: for the whole batch.
        piece: int64 scalar, the number of the microbatch, or of a slice of it.
        cutting: how the batch is cut.
    """
    replicas, slices = cutting.replicas, cutting.num_slices
    microbatch, own = piece, None
    if slices > 1:
        microbatch, own = tf.math.floordiv(piece, slices), tf.math.floormod(piece, slices)
    numbers = [microbatch]
    if replicas > 1:
        numbers = [microbatch * replicas + replica for replica in range(replicas)]
    return [None if t is None else _part(t, n, own, cutting) for n in numbers for t in tensors]


def _part(
    tensor: tf.Tensor, number: tf.Tensor, own: tf.Tensor | None, cutting: Cutting
) -> tf.Tensor:
    spec = cutting.of_part(tf.TensorSpec(tensor.shape, tensor.dtype))
    zero, rank = tf.constant(0, tf.int64), tensor.shape.rank
    begin = tf.one_hot(cutting.batch_dim, rank, number * cutting.part_size, zero)
    if own is not None and cutting.is_sliced(tensor.shape):
        begin += tf.one_hot(cutting.sequence_dim, rank, own * cutting.slice_size, zero)
    part = tf.slice(tensor, begin, tf.constant(static_sizes(spec), tf.int64))
    part.set_shape(spec.shape)
    return part
