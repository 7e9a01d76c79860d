"""Splits tensors of the whole batch into pieces, and joins pieces to the whole batch.

A piece is a microbatch, or a slice of its sequences. The replicas of a stage divide a piece; its
parts are in the order of the replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import join_from_front, static_sizes
from pipemesh.plan.slices import Span
from pipemesh.recurrent.stage import Stage
from pipemesh.schedule import Action


@dataclasses.dataclass(frozen=True)
class Cutting:
    """The split of the batch into microbatches, and of these into sequence slices.

    A piece is the input of an action: slice `q` of microbatch `m` is piece `m * num_slices + q`.
    """

    num_microbatches: int
    microbatch_size: int
    batch_dim: int
    replicas: int = 1  # each gets a part of every microbatch
    num_slices: int = 1
    slice_size: int = 0  # positions; 0 for whole sequences
    sequence_dim: int = 1
    lengths: tuple[int, ...] = ()  # of the slices, if they differ
    span: Span | None = None  # the slice that it is for, one of `of_slices`

    @property
    def of_slices(self) -> list[Cutting]:
        """A cutting for each slice if they differ in length, otherwise this one for all."""
        begins = itertools.accumulate(self.lengths, initial=0)
        return [
            dataclasses.replace(self, slice_size=length, span=Span(begin, self.length))
            for begin, length in zip(begins, self.lengths, strict=False)
        ] or [self]

    @property
    def length(self) -> int:
        """The positions of a whole sequence; 0 if sequences are not sliced."""
        return sum(self.lengths) or self.slice_size * self.num_slices

    @property
    def slice_lengths(self) -> Sequence[int]:
        """The positions of each slice."""
        return self.lengths or [self.slice_size] * self.num_slices

    @property
    def num_pieces(self) -> int:
        """The number of pieces of each stage."""
        return self.num_microbatches * self.num_slices

    def is_sliced(self, shape: tf.TensorShape) -> bool:
        """Returns True if a tensor, of the whole batch or of a part, has the dim of sequences."""
        return self.num_slices > 1 and len(shape) > self.sequence_dim

    def text(self, action: Action) -> str:
        """Returns an action as the schedule prints it, given one whose microbatch is a piece."""
        if self.num_slices == 1:
            return str(action)
        return str(Action(action.stage, action.kind, *divmod(action.microbatch, self.num_slices)))

    def of_part(
        self, spec: tf.TensorSpec, batch: bool = True, sequences: bool = True
    ) -> tf.TensorSpec:
        """Returns the spec of a replica's part of an input, for one piece.

        Without `batch` it is for all examples, without `sequences` for whole sequences.
        """
        shape = spec.shape.as_list()
        if batch:
            shape[self.batch_dim] = self.part_size
        if sequences and self.is_sliced(spec.shape):
            shape[self.sequence_dim] = self.slice_size
        return tf.TensorSpec(shape, spec.dtype)

    def for_whole_batch(self, stage: Stage) -> list[Stage]:
        """Returns variants of a stage with a possible carry of the whole batch, for tracing.

        A carry that is reset for each microbatch has the rows of one. They lie along the batch dim
        of the inputs or, if time comes first in the inputs, along another dim.
        """
        if self.num_slices == 1 or not stage.recurrent or self.num_parts == 1:
            return [stage]
        variants: list[Stage] = []
        for first in (self.batch_dim, 0):
            carry: list[Any] = []
            for tensor in stage.carry:
                shape = static_sizes(tensor)
                dims = [dim for dim, size in enumerate(shape) if size == self.part_size]
                if dims:
                    shape[first if first in dims else dims[0]] *= self.num_parts
                carry.append(tf.TensorSpec(shape, tensor.dtype))
            variants.append(dataclasses.replace(stage, carry=carry))
        return variants if variants[0].carry != variants[1].carry else variants[:1]

    @property
    def num_parts(self) -> int:
        """The number of parts of the whole batch, over microbatches and replicas."""
        return self.num_microbatches * self.replicas

    @property
    def part_size(self) -> int:
        """The number of examples of a part."""
        return self.microbatch_size // self.replicas

    @property
    def part(self) -> str:
        """The word for a part in errors."""
        return "a microbatch" if self.replicas == 1 else "a replica's part of a microbatch"

    @property
    def parts(self) -> str:
        """The word for parts in errors."""
        return "microbatches" if self.replicas == 1 else "the replicas' parts of microbatches"


def split(tensor: tf.Tensor, cutting: Cutting) -> list[list[tf.Tensor]]:
    """Returns for each piece the parts of its replicas."""
    examples = [cutting.part_size] * cutting.num_parts
    rows = _parts(tensor, examples, cutting.batch_dim)
    slices, is_sliced = cutting.num_slices, cutting.is_sliced(tensor.shape)
    columns = [
        _parts(row, cutting.slice_lengths, cutting.sequence_dim) if is_sliced else [row] * slices
        for row in rows
    ]
    return [
        [columns[m * cutting.replicas + replica][q] for replica in range(cutting.replicas)]
        for m in range(cutting.num_microbatches)
        for q in range(cutting.num_slices)
    ]


def _parts(tensor: tf.Tensor, sizes: Sequence[int], axis: int) -> list[tf.Tensor]:
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        return tf.split(tensor, len(sizes) if len({*sizes}) == 1 else [*sizes], axis=axis)
    # GPUs have no kernel of `Split` for integers and booleans.
    before, ends = [slice(None)] * axis, itertools.accumulate(sizes, initial=0)
    return [tensor[(*before, slice(a, b))] for a, b in itertools.pairwise(ends)]


def parts(
    tensors: Sequence[tf.Tensor | None], piece: tf.Tensor, cutting: Cutting
) -> list[tf.Tensor | None]:
    """Returns the parts of one piece, replica by replica."""
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
        rows = [
            parts[m * slices * replicas + replica :: replicas][:slices]
            for m in range(cutting.num_microbatches)
            for replica in range(replicas)
        ]
        is_sliced = cutting.is_sliced(parts[0].shape)
        parts = [
            tf.concat(pieces, cutting.sequence_dim) if is_sliced else tf.add_n(pieces)
            for pieces in rows
        ]
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=cutting.batch_dim)


def join_stacked(parts: Sequence[tf.Tensor], cutting: Cutting) -> tf.Tensor:
    """Joins the parts of all pieces; each replica has one tensor with a dim for pieces."""
    stacked, shape = parts[0], static_sizes(parts[0])[1:]
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
        stacked = tf.reshape(stacked, [cutting.num_parts, *shape])
    return join_from_front(stacked, cutting.batch_dim)
