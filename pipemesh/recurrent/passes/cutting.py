"""The split of a batch into the pieces that actions work on."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.stage import Stage
from pipemesh.schedule import Action


@dataclasses.dataclass(frozen=True)
class Cutting:
    """The split of the batch into microbatches, and of these into sequence slices.

    A piece is the input of an action: slice `q` of microbatch `m` is piece `m * num_slices + q`.

    Attributes:
        num_microbatches: number of microbatches.
        microbatch_size: number of examples in each.
        batch_dim: the dim of the pipeline's inputs along which microbatches are split.
        replicas: number of parts of each microbatch, one per replica.
        num_slices: number of sequence slices.
        slice_size: number of positions in each; 0 for whole sequences.
        sequence_dim: the dim of the pipeline's inputs along which slices are split.
    """

    num_microbatches: int
    microbatch_size: int
    batch_dim: int
    replicas: int = 1
    num_slices: int = 1
    slice_size: int = 0
    sequence_dim: int = 1

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

    def of_part(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        """Returns the spec of a replica's part of an input, for one piece."""
        shape = spec.shape.as_list()
        shape[self.batch_dim] = self.part_size
        if self.is_sliced(spec.shape):
            shape[self.sequence_dim] = self.slice_size
        return tf.TensorSpec(shape, spec.dtype)

    def with_whole_batch(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        """Returns the spec of one slice of an input, for all examples of the batch."""
        shape = spec.shape.as_list()
        if self.is_sliced(spec.shape):
            shape[self.sequence_dim] = self.slice_size
        return tf.TensorSpec(shape, spec.dtype)

    def with_whole_sequences(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        """Returns the spec of one part's examples of an input, with whole sequences."""
        shape = spec.shape.as_list()
        shape[self.batch_dim] = self.part_size
        return tf.TensorSpec(shape, spec.dtype)

    def for_whole_batch(self, stage: Stage) -> list[Stage]:
        """Returns variants of a stage with a possible carry of the whole batch, for tracing.

        A carry that is reset for each microbatch has the rows of one. They lie along the batch dim
        of the inputs or, if time comes first in the inputs, along another dim.
        """
        if self.num_slices == 1 or not stage.recurrent or self.num_parts == 1:
            return [stage]
        found: list[Stage] = []
        for first in (self.batch_dim, 0):
            carry: list[Any] = []
            for tensor in stage.carry:
                shape = static_sizes(tensor)
                dims = [dim for dim, size in enumerate(shape) if size == self.part_size]
                if dims:
                    shape[first if first in dims else dims[0]] *= self.num_parts
                carry.append(tf.TensorSpec(shape, tensor.dtype))
            found.append(dataclasses.replace(stage, carry=carry))
        return found if found[0].carry != found[1].carry else found[:1]

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
