"""Collectives by TPU operations: core i is replica i of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.lowering.simd.simd_lowering import Collectives
from pipemesh.lowering.simd.tf_collectives import gathered_to_dim
from pipemesh.mesh import Mesh

_REDUCE: dict[str, Callable[..., tf.Tensor]] = {"max": tf.reduce_max, "min": tf.reduce_min}


class TpuCollectives(Collectives):
    """Collectives by `CrossReplicaSum`, `AllToAll` and `CollectivePermute`.

    Processor i of the mesh is replica i. Group assignments and pairs are constants of the program
    and do not depend on the core.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def _groups(self, axes: Sequence[str]) -> list[list[int]]:
        return [list(group) for group in self._mesh.groups(axes)]

    def all_reduce(self, x: tf.Tensor, axes: Sequence[str], op: str) -> tf.Tensor:
        """Calls one `CrossReplicaSum`; gathers for max and min, which have no operation."""
        if op == "sum":
            # The operation supports no other integers.
            narrow = tf.cast(x, tf.int32) if x.dtype == tf.int64 else x
            return tf.cast(collectives.tpu_all_sum(narrow, self._groups(axes)), x.dtype)
        for axis in axes:
            x = _REDUCE[op](self._gather(x, axis), axis=0)
        return x

    def _gather(self, x: tf.Tensor, axis: str) -> tf.Tensor:
        """Stacks all slices along an axis as the first dim; each core sends a copy to each."""
        copies = tf.stack([x] * self._mesh.size(axis))
        return collectives.tpu_all_to_all(copies, 0, 0, self._groups([axis]))

    def all_gather(self, x: tf.Tensor, axis: str, dim: int) -> tf.Tensor:
        """Calls one `AllToAll` of copies, which sends no more than an all-gather needs."""
        return gathered_to_dim(self._gather(x, axis), dim)

    def all_to_all(self, x: tf.Tensor, axis: str, split_dim: int, concat_dim: int) -> tf.Tensor:
        """Calls one `AllToAll`."""
        return collectives.tpu_all_to_all(x, concat_dim, split_dim, self._groups([axis]))

    def permute(self, x: tf.Tensor, axis: str, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        """Calls one `CollectivePermute`."""
        ends = [
            [group[source], group[target]]
            for group in self._groups([axis])
            for source, target in pairs
        ]
        return collectives.tpu_permute(x, ends)
