"""Collectives by TensorFlow's operations: cores are CPUs or GPUs of one or more processes."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.collectives import Meeting
from pipemesh.backend.static_shape import static_sizes
from pipemesh.lowering.lowering import usual_bytes
from pipemesh.lowering.simd.simd_lowering import Collectives
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
# process. Communicating processes build the same programs in the same order, so they count alike.
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


class TfCollectives(Collectives):
    """Collectives by `CollectiveReduceV2`, `CollectiveGatherV2` and `CollectiveAllToAllV2`.

    Args:
        mesh: the mesh.
        core: int32 scalar, the number of the core.
        token: resource scalar of the core's device alone; it puts the core's collectives into one
            order. Without it they deadlock.
        keys: group keys, shared by all programs on the same devices.
        instance_keys: operation keys; by default the next ones of this process. That is right if
            one program is traced for all cores. If each core calls the operations itself, each
            needs its own iterator over the same keys.
        calls: gets one line per operation; used to compare the operations of two programs.
    """

    def __init__(
        self,
        mesh: Mesh,
        core: tf.Tensor,
        token: tf.Tensor,
        keys: GroupKeys,
        instance_keys: Iterator[int] = _instance_keys,
        calls: list[str] | None = None,
    ) -> None:
        self._mesh = mesh
        self._core = core
        self._token = token
        self._keys = keys
        self._instance_keys = instance_keys
        self._calls = calls

    def _meeting(self, name: str, x: tf.Tensor, axes: Sequence[str]) -> Meeting:
        size = math.prod(self._mesh.size(axis) for axis in axes)
        ordered = tuple(axis for axis in self._mesh.axis_names if axis in axes)
        instance = next(self._instance_keys)
        if self._calls is not None:
            self._calls.append(
                f"collective {instance}, {name} over {'+'.join(ordered)} of {x.dtype.name}{x.shape}"
            )
        return Meeting(size, self._keys.key(ordered, self._core), instance, self._token)

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
        meeting = self._meeting(f"all_reduce ({op})", x, axes)
        result = collectives.reduce(sendable(x), meeting, MERGE[op])
        return received(result, x, x.shape)

    def _gather(self, x: tf.Tensor, axis: str) -> tf.Tensor:
        """Stacks all slices along an axis as the first dim."""
        size = self._mesh.size(axis)
        result = collectives.gather(sendable(x)[None], self._meeting("all_gather", x, [axis]))
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
        meeting = self._meeting("all_to_all", x, [axis])
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
