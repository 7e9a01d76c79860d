"""Collectives of cores: TensorFlow's operations on CPUs and GPUs, and those of TPUs."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.collectives import Meeting
from pipemesh.backend.static_shape import static_sizes
from pipemesh.lowering.lowering import usual_bytes
from pipemesh.mesh import Mesh

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


class TfCollectives:
    """Collectives by `CollectiveReduceV2`, `CollectiveGatherV2` and `CollectiveAllToAllV2`."""

    # `core` is the number of the core, and `token` a resource scalar of its device alone, which
    # puts the core's collectives into one order; without it they deadlock. All programs on the same
    # devices share `keys`. A program that is traced for all cores takes the next `instance_keys` of
    # the process; cores that call operations eagerly need iterators over the same keys.

    def __init__(
        self,
        mesh: Mesh,
        core: tf.Tensor,
        token: tf.Tensor,
        keys: GroupKeys,
        instance_keys: Iterator[int] = _instance_keys,
    ) -> None:
        self._mesh = mesh
        self._core = core
        self._token = token
        self._keys = keys
        self._instance_keys = instance_keys

    def _meeting(self, axes: Sequence[str]) -> Meeting:
        size = math.prod(self._mesh.size(axis) for axis in axes)
        ordered = tuple(axis for axis in self._mesh.axis_names if axis in axes)
        group = self._keys.key(ordered, self._core)
        return Meeting(size, group, next(self._instance_keys), self._token)

    def bytes_sent(self, primitive: str, axes: Sequence[str], x: tf.Tensor) -> int:
        """Counts bytes of the sent dtype, and counts a permute as an all-gather."""
        size = (x.shape.num_elements() or 0) * CARRIERS.get(x.dtype, x.dtype).size
        way = "all_gather" if primitive == "permute" else primitive
        return usual_bytes(way, size, math.prod(self._mesh.size(axis) for axis in axes))

    def all_reduce(self, x: tf.Tensor, axes: Sequence[str], op: str) -> tf.Tensor:
        """Calls one `CollectiveReduceV2`."""
        if x.shape.num_elements() == 0:
            return tf.identity(x)
        # bfloat16 is summed in float32, to round once and not at every step.
        meeting = self._meeting(axes)
        result = collectives.reduce(sendable(x), meeting, MERGE[op])
        return received(result, x, x.shape)

    def _gather(self, x: tf.Tensor, axis: str) -> tf.Tensor:
        """Stacks all slices along an axis as the first dim."""
        size = self._mesh.size(axis)
        result = collectives.gather(sendable(x)[None], self._meeting([axis]))
        return received(result, x, [size, *x.shape])

    def all_gather(self, x: tf.Tensor, axis: str, dim: int) -> tf.Tensor:
        """Calls one `CollectiveGatherV2` and a concat."""
        if x.shape.num_elements() == 0:
            return tf.concat([x] * self._mesh.size(axis), dim)
        gathered = self._gather(x, axis)
        return gathered_to_dim(gathered, dim)

    def all_to_all(self, x: tf.Tensor, axis: str, split_dim: int, concat_dim: int) -> tf.Tensor:
        """Calls one `CollectiveAllToAllV2` between a split and a concat."""
        size = self._mesh.size(axis)
        pieces = tf.stack(tf.split(x, size, split_dim))
        if x.shape.num_elements() == 0:
            return gathered_to_dim(pieces, concat_dim)
        meeting = self._meeting([axis])
        result = collectives.all_to_all(sendable(pieces), meeting)
        return gathered_to_dim(received(result, x, pieces.shape), concat_dim)

    def permute(self, x: tf.Tensor, axis: str, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
        """Gathers all slices and takes one: there is no permute kernel."""
        if x.shape.num_elements() == 0:
            return tf.identity(x)
        size = self._mesh.size(axis)
        source = {b: a for a, b in pairs}
        gathered = tf.concat([self._gather(x, axis), tf.zeros_like(x)[None]], 0)
        table = tf.constant([source.get(at, size) for at in range(size)])
        at = tf.math.floormod(self._core // self._mesh.stride(axis), size)
        return tf.gather(gathered, table[at])


def gathered_to_dim(stacked: tf.Tensor, dim: int) -> tf.Tensor:
    """Joins the n parts stacked in the first dim along `dim`, counted without the first."""
    n, *sizes = static_sizes(stacked)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
    sizes[dim] *= n
    return tf.reshape(tf.transpose(stacked, order), sizes)


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


class TpuCollectives:
    """Collectives by `CrossReplicaSum`, `AllToAll` and `CollectivePermute`.

    Processor i of the mesh is replica i. Group assignments and pairs are constants of the program
    and do not depend on the core.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def bytes_sent(self, primitive: str, axes: Sequence[str], x: tf.Tensor) -> None:
        """Returns None, for the usual number of bytes."""

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
