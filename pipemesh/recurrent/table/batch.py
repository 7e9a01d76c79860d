"""Splits tensors of the whole batch into pieces, and joins pieces to the whole batch.

A piece is a microbatch, or a slice of its sequences. The replicas of a stage divide a piece; its
parts are in the order of the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.cutting import Cutting


def split(tensor: tf.Tensor, cutting: Cutting) -> list[list[tf.Tensor]]:
    """Returns for each piece the parts of its replicas."""
    rows = tf.split(tensor, cutting.num_parts, axis=cutting.batch_dim)
    columns = [[row] * cutting.num_slices for row in rows]
    if cutting.is_sliced(tensor.shape) and cutting.num_slices > 1:
        columns = [tf.split(row, cutting.num_slices, axis=cutting.sequence_dim) for row in rows]
    return [
        [columns[m * cutting.replicas + replica][q] for replica in range(cutting.replicas)]
        for m in range(cutting.num_microbatches)
        for q in range(cutting.num_slices)
    ]


def parts(
    tensors: Sequence[tf.Tensor | None], piece: tf.Tensor, cutting: Cutting
) -> list[tf.Tensor | None]:
    """Returns the parts of one piece, replica by replica.

    `piece` is an int64 scalar that may be known only when the step runs.
    """
    replicas, slices = cutting.replicas, cutting.num_slices
    microbatch, sequence_slice = piece, None
    if slices > 1:
        microbatch = tf.math.floordiv(piece, slices)
        sequence_slice = tf.math.floormod(piece, slices)
    numbers = [microbatch]
    if replicas > 1:
        numbers = [microbatch * replicas + replica for replica in range(replicas)]
    return [
        None if t is None else _part(t, n, sequence_slice, cutting)
        for n in numbers
        for t in tensors
    ]


def _part(
    tensor: tf.Tensor, number: tf.Tensor, sequence_slice: tf.Tensor | None, cutting: Cutting
) -> tf.Tensor:
    spec = cutting.of_part(tf.TensorSpec(tensor.shape, tensor.dtype))
    zero, rank = tf.constant(0, tf.int64), tensor.shape.rank
    begin = tf.one_hot(cutting.batch_dim, rank, number * cutting.part_size, zero)
    if sequence_slice is not None and cutting.is_sliced(tensor.shape):
        offset = sequence_slice * cutting.slice_size
        begin += tf.one_hot(cutting.sequence_dim, rank, offset, zero)
    part = tf.slice(tensor, begin, tf.constant(static_sizes(spec), tf.int64))
    part.set_shape(spec.shape)
    return part


def join(parts: Sequence[tf.Tensor], cutting: Cutting) -> tf.Tensor:
    """Joins the parts of all pieces, ordered by piece and replica, to a tensor of the whole batch.

    A tensor without the sequence dim is a gradient of an input that every slice gets; slices are
    summed.
    """
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    replicas, slices = cutting.replicas, cutting.num_slices
    if slices > 1:
        rows = []
        for m in range(cutting.num_microbatches):
            for replica in range(replicas):
                mine = parts[m * slices * replicas + replica :: replicas][:slices]
                is_sliced = cutting.is_sliced(parts[0].shape)
                rows.append(tf.concat(mine, cutting.sequence_dim) if is_sliced else tf.add_n(mine))
        parts = rows
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=cutting.batch_dim)


def join_stacked(parts: Sequence[tf.Tensor], cutting: Cutting) -> tf.Tensor:
    """Joins the parts of all pieces; each replica has one tensor with a dim for pieces."""
    shape, batch_dim = static_sizes(parts[0])[1:], cutting.batch_dim
    num_parts, stacked = cutting.num_parts, parts[0]
    if len(parts) > 1:
        stacked = tf.stack(parts, axis=1)
        stacked = tf.reshape(stacked, [cutting.num_pieces * cutting.replicas, *shape])
    if not shape:
        return tf.ensure_shape(stacked, [cutting.num_pieces * cutting.replicas])
    if cutting.num_slices > 1:
        counts = cutting.num_microbatches, cutting.num_slices, cutting.replicas
        stacked, at = tf.reshape(stacked, [*counts, *shape]), cutting.sequence_dim
        if len(shape) > at:
            order = [0, *range(2, 3 + at), 1, *range(3 + at, 3 + len(shape))]
            stacked = tf.transpose(stacked, order)
            shape[at] *= cutting.num_slices
        else:
            stacked = tf.reduce_sum(stacked, axis=1)
        stacked = tf.reshape(stacked, [num_parts, *shape])
    order = [*range(1, batch_dim + 1), 0, *range(batch_dim + 1, len(shape) + 1)]
    if batch_dim:
        stacked = tf.transpose(stacked, order)
    shape[batch_dim] *= num_parts
    return tf.reshape(stacked, shape)
