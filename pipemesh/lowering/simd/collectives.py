"""Kinds of `SimdLowering`: by TensorFlow's collectives on CPUs and GPUs, and by those of TPUs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.collectives import Meeting
from pipemesh.backend.static_shape import join_from_front
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.network import sent_bytes

MERGE = {"sum": "Add", "max": "Max", "min": "Min"}
# Dtypes that all kernels can send. Other dtypes are converted to one of these without loss.
_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
CARRIERS = {
    tf.bool: tf.int32,
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}
# A key never serves a second group or a second operation: TensorFlow keeps keys for the life of the
# process.
_group_keys = itertools.count(1)
_instance_keys = itertools.count(1)
# Keys of cores that run without a graph: one range per run, and each core counts in it alone.
_EAGER_KEYS = 1 << 12
_eager_runs = itertools.count((1 << 30), _EAGER_KEYS)


def eager_instance_keys() -> range:
    """Returns the keys for one program that runs without a graph, the same on all cores."""
    first = next(_eager_runs)
    return range(first, first + _EAGER_KEYS)


class GroupKeys:
    """The keys of the groups of cores of one mesh on one set of devices."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._first: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def key(self, axes: tuple[str, ...], core: tf.Tensor) -> tf.Tensor:
        """Returns the key of the group of `core`: int32 scalar, computed from the core's number."""
        with self._lock:
            if axes not in self._first:
                keys = [next(_group_keys) for _ in self._mesh.groups(axes)]
                self._first[axes] = keys[0]
        group = tf.zeros([], tf.int32)
        for axis, size in self._mesh.axes:
            if axis not in axes:
                at = tf.math.floormod(core // self._mesh.stride(axis), size)
                group = group * size + at
        return self._first[axes] + group


class TfLowering(SimdLowering):
    """Communicates by `CollectiveReduceV2`, `CollectiveGatherV2` and `CollectiveAllToAllV2`."""

    # `token` is a resource scalar of the core's device alone, which puts the core's collectives
    # into one order; without it they deadlock. All programs on the same devices share `keys`. A
    # program that is traced for all cores takes the next `instance_keys` of the process; cores that
    # call operations eagerly need iterators over the same keys.

    def __init__(
        self,
        mesh: Mesh,
        rules: LayoutRules,
        core: tf.Tensor,
        token: tf.Tensor,
        keys: GroupKeys,
        instance_keys: Iterator[int] = _instance_keys,
    ) -> None:
        super().__init__(mesh, rules, core)
        self._token = token
        self._keys = keys
        self._instance_keys = instance_keys

    def _meeting(self, axes: Sequence[str]) -> Meeting:
        ordered = tuple(axis for axis in self.mesh.axis_names if axis in axes)
        group = self._keys.key(ordered, self.core)
        return Meeting(self.group_size(axes), group, next(self._instance_keys), self._token)

    def _count(self, primitive: str, axes: Sequence[str], x: tf.Tensor) -> None:
        """Counts bytes of the sent dtype, and counts a permute as an all-gather."""
        size = (x.shape.num_elements() or 0) * CARRIERS.get(x.dtype, x.dtype).size
        way = "all_gather" if primitive == "permute" else primitive
        sent = sent_bytes(way, size, self.group_size(axes))
        self.costs.add(primitive, axes, x, self._is_backward, sent)

    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Calls one `CollectiveReduceV2`."""
        (tensor,) = x
        if tensor.shape.num_elements() == 0:
            return (tf.identity(tensor),)
        # bfloat16 is summed in float32, to round once and not at every step.
        meeting = self._meeting(axes)
        result = collectives.reduce(sendable(tensor), meeting, MERGE[op])
        return (received(result, tensor, tensor.shape),)

    def _gather(self, x: tf.Tensor, axis: str) -> tf.Tensor:
        """Stacks all slices along an axis as the first dim."""
        result = collectives.gather(sendable(x)[None], self._meeting([axis]))
        return received(result, x, [self.mesh.size(axis), *x.shape])

    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Calls one `CollectiveGatherV2` and a concat."""
        (tensor,) = x
        if tensor.shape.num_elements() == 0:
            return (tf.concat([tensor] * self.mesh.size(axis), dim),)
        return (join_from_front(self._gather(tensor, axis), dim),)

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Calls one `CollectiveAllToAllV2` between a split and a concat."""
        (tensor,) = x
        pieces = tf.stack(tf.split(tensor, self.mesh.size(axis), split_dim))
        if tensor.shape.num_elements() != 0:
            result = collectives.all_to_all(sendable(pieces), self._meeting([axis]))
            pieces = received(result, tensor, pieces.shape)
        return (join_from_front(pieces, concat_dim),)

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Gathers all slices and takes one: there is no permute kernel."""
        (tensor,) = x
        if tensor.shape.num_elements() == 0:
            return (tf.identity(tensor),)
        size = self.mesh.size(axis)
        source = {b: a for a, b in pairs}
        gathered = tf.concat([self._gather(tensor, axis), tf.zeros_like(tensor)[None]], 0)
        table = tf.constant([source.get(at, size) for at in range(size)])
        (at,) = self.coordinate(axis)
        return (tf.gather(gathered, table[at]),)


def sendable(x: tf.Tensor) -> tf.Tensor:
    """Converts to a dtype that can be sent, or raises a TypeError if there is none."""
    if x.dtype in _SENT:
        return x
    if x.dtype not in CARRIERS:
        known = ", ".join(dtype.name for dtype in (*_SENT, *CARRIERS))
        raise TypeError(f"{x.dtype.name} cannot be sent between cores; cast it to one of {known}")
    return tf.cast(x, CARRIERS[x.dtype])


def received(result: tf.Tensor, like: tf.Tensor, shape: object) -> tf.Tensor:
    """Converts a received tensor to the dtype of `like`, and sets its shape."""
    return tf.cast(tf.ensure_shape(result, shape), like.dtype)


_REDUCE: dict[str, Callable[..., tf.Tensor]] = {"max": tf.reduce_max, "min": tf.reduce_min}


class TpuLowering(SimdLowering):
    """Communicates by `CrossReplicaSum`, `AllToAll` and `CollectivePermute`.

    Processor i of the mesh is replica i. Group assignments and pairs are constants of the program
    and do not depend on the core.
    """

    def _groups(self, axes: Sequence[str]) -> list[list[int]]:
        return [list(group) for group in self.mesh.groups(axes)]

    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Calls one `CrossReplicaSum`; gathers for max and min, which have no operation."""
        (tensor,) = x
        if op == "sum":
            # The operation supports no other integers.
            narrow = tf.cast(tensor, tf.int32) if tensor.dtype == tf.int64 else tensor
            return (tf.cast(collectives.tpu_all_sum(narrow, self._groups(axes)), tensor.dtype),)
        for axis in axes:
            tensor = _REDUCE[op](self._gather(tensor, axis), axis=0)
        return (tensor,)

    def _gather(self, x: tf.Tensor, axis: str) -> tf.Tensor:
        """Stacks all slices along an axis as the first dim; each core sends a copy to each."""
        copies = tf.stack([x] * self.mesh.size(axis))
        return collectives.tpu_all_to_all(copies, 0, 0, self._groups([axis]))

    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Calls one `AllToAll` of copies, which sends no more than an all-gather needs."""
        return (join_from_front(self._gather(x[0], axis), dim),)

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Calls one `AllToAll`."""
        groups = self._groups([axis])
        return (collectives.tpu_all_to_all(x[0], concat_dim, split_dim, groups),)

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Calls one `CollectivePermute`."""
        ends = [
            [group[source], group[target]]
            for group in self._groups([axis])
            for source, target in pairs
        ]
        return (collectives.tpu_permute(x[0], ends),)
