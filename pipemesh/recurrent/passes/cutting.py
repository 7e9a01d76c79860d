"""How a batch is cut into what actions work on."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.stage import Stage
from pipemesh.schedule import Action


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How the batch is cut into microbatches, and these into slices of their sequences.

    A piece is what an action works on: slice `q` of microbatch `m` is piece `m * num_slices + q`.

    Attributes:
        num_microbatches: how many there are.
        microbatch_size: how many examples each has.
        batch_dim: the dim of the pipeline's inputs along which they are cut.
        replicas: into how many parts each microbatch is cut once more, one a replica.
        num_slices: into how many slices sequences are cut.
        slice_size: how many positions each has; 0 for whole sequences.
        sequence_dim: the dim of the pipeline's inputs along which slices are cut.
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
        """How many pieces each stage works on."""
        return self.num_microbatches * self.num_slices

    def is_sliced(self, shape: tf.TensorShape) -> bool:
        """Whether a tensor, of the whole batch or of a part, has the dim along which slices are."""
        return self.num_slices > 1 and len(shape) > self.sequence_dim

    def text(self, action: Action) -> str:
        """An action whose microbatch is the number of a piece, as it stands in the schedule."""
        if self.num_slices == 1:
            return str(action)
        return str(Action(action.stage, action.kind, *divmod(action.microbatch, self.num_slices)))

    def of_part(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        """What a replica gets of an input, given that of the whole batch, for one piece."""
        shape = spec.shape.as_list()
        shape[self.batch_dim] = self.part_size
        if self.is_sliced(spec.shape):
            shape[self.sequence_dim] = self.slice_size
        return tf.TensorSpec(shape, spec.dtype)

    def with_whole_batch(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        """Of an input of the whole batch a slice, for all its examples."""
        shape = spec.shape.as_list()
        if self.is_sliced(spec.shape):
            shape[self.sequence_dim] = self.slice_size
        return tf.TensorSpec(shape, spec.dtype)

    def with_whole_sequences(self, spec: tf.TensorSpec) -> tf.TensorSpec:
        """Of an input of the whole batch a part's examples, with whole sequences."""
        shape = spec.shape.as_list()
        shape[self.batch_dim] = self.part_size
        return tf.TensorSpec(shape, spec.dtype)

    def for_whole_batch(self, stage: Stage) -> list[Stage]:
        """A stage that is to be traced with the whole batch, as what it may be.

        A carry that starts anew with each microbatch has the rows of one. They lie along the
        batch's dim, as in inputs, or, as in a state where time comes first in these, along another.
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
        """How many parts the whole batch has: those of the first microbatch, of the second, ..."""
        return self.num_microbatches * self.replicas

    @property
    def part_size(self) -> int:
        """How many examples a part has."""
        return self.microbatch_size // self.replicas

    @property
    def part(self) -> str:
        """What to call a part in errors."""
        return "a microbatch" if self.replicas == 1 else "a replica's part of a microbatch"

    @property
    def parts(self) -> str:
        """What to call the parts in errors."""
        return "microbatches" if self.replicas == 1 else "the replicas' parts of microbatches"
