"""Values of all microbatches, by their number, where that is known only when the step runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import list_get, list_set
from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.remat import FULL, Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import Kind
from pipemesh.recurrent.table.machine import Machine


class Key(NamedTuple):
    """A kind of value, its stage, and the mode of remat that it depends on."""

    kind: Kind[Any]
    stage: int
    mode: Mode


class Lists:
    """A list of tensors for each tensor of each channel, with one element a microbatch.

    They are TensorFlow's own list values: what is put makes a new list, which shares all other
    elements with the old one.

    Args:
        machine: knows shapes.
        stages: the stages.
        num_microbatches: how many elements there are.

    Attributes:
        handles: of each channel the lists, None in place of a tensor that does not exist; and those
            of other names.
        sizes: how many elements those have that have another number.
        elsewhere: the devices of those that do not lie where their values are made.
    """

    def __init__(self, machine: Machine, stages: Sequence[Stage], num_microbatches: int) -> None:
        self.handles: dict[Any, list[tf.Tensor | None]] = {}
        self.sizes: Mapping[Any, int] = {}
        self.elsewhere: dict[Key, list[str]] = {}
        self._machine = machine
        self._stages = stages
        self._num_microbatches = num_microbatches

    @staticmethod
    def key(kind: Kind[Any], stage: int, mode: Mode) -> Key:
        """The key of a channel; only what is kept depends on the mode."""
        return Key(kind, stage, mode if kind.by_mode else FULL)

    def reserve(self, keys: Iterable[Key]) -> None:
        """Makes the lists that do not exist yet."""
        for key in keys:
            if key not in self.handles:
                self.handles[key] = [
                    None if spec is None else self._empty(device, spec.dtype, key)
                    for spec, device in zip(
                        self._machine.specs(*key), self._devices(key), strict=True
                    )
                ]

    def reserve_one(self, name: Hashable, dtype: tf.DType, device: str) -> None:
        """Makes a list of one's own, of values of any shape, unless it exists."""
        if name not in self.handles:
            self.handles[name] = [self._empty(device, dtype, name)]

    def _devices(self, key: Key) -> list[str]:
        """Where the values of a channel lie."""
        if key in self.elsewhere:
            return self.elsewhere[key]
        devices = self._stages[key.stage].devices
        return [devices[place] for place in self._machine.places(*key)]

    def _empty(self, device: str, dtype: tf.DType, name: Hashable) -> tf.Tensor:
        with tf.device(device):
            # Of any shape, because cleared elements have another one.
            return tf.raw_ops.TensorListReserve(
                element_shape=tf.constant(-1),
                num_elements=tf.constant(self.sizes.get(name, self._num_microbatches)),
                element_dtype=dtype,
            )

    def put(self, key: Key, microbatch: tf.Tensor, values: Sequence[tf.Tensor | None]) -> None:
        """Puts values in the place of a microbatch."""
        self.reserve([key])
        self._set(key, microbatch, values)

    def _set(self, key: Key, microbatch: tf.Tensor, values: Sequence[tf.Tensor | None]) -> None:
        index = tf.cast(microbatch, tf.int32)
        given = zip(self.handles[key], values, self._devices(key), strict=True)
        self.handles[key] = [
            handle if handle is None or value is None else _put(handle, index, value, device)
            for handle, value, device in given
        ]

    def take(self, key: Key, microbatch: tf.Tensor) -> list[tf.Tensor | None]:
        """Takes the values of a microbatch, so that the list no longer holds them."""
        index = tf.cast(microbatch, tf.int32)
        known = zip(self.handles[key], self._machine.specs(*key), self._devices(key), strict=True)
        values: list[tf.Tensor | None] = []
        cleared: list[tf.Tensor | None] = []
        for handle, spec, device in known:
            with tf.device(device):
                if handle is None or spec is None:
                    values.append(None)
                    cleared.append(None)
                else:
                    values.append(_get(handle, index, spec))
                    cleared.append(nothing(spec.dtype))
        self._set(key, microbatch, cleared)
        return values

    def joined(self, key: Key, cutting: Cutting) -> list[tf.Tensor | None]:
        """The values of all microbatches and replicas, as those of the whole batch; see `join`."""
        stage = self._stages[key.stage]
        specs, handles = self._machine.specs(*key), self.handles[key]
        devices, count = self._devices(key), len(specs) // stage.of_home.num_replicas
        joined: list[tf.Tensor | None] = []
        for i in range(count):
            parts = [
                self._stacked(handle, spec, device)
                for handle, device in zip(handles[i::count], devices[i::count], strict=True)
                if handle is not None and (spec := specs[i]) is not None
            ]
            with tf.device(devices[i]):
                joined.append(_join(parts, cutting) if parts else None)
        return joined

    def _stacked(self, handle: tf.Tensor, spec: tf.TensorSpec, device: str) -> tf.Tensor:
        with tf.device(device):
            return tf.raw_ops.TensorListStack(
                input_handle=handle,
                element_shape=tf.constant(static_sizes(spec), tf.int32),
                element_dtype=spec.dtype,
                num_elements=self._num_microbatches,
            )


def _join(parts: Sequence[tf.Tensor], cutting: Cutting) -> tf.Tensor:
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


def _put(handle: tf.Tensor, index: tf.Tensor, value: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return list_set(handle, index, value)


def _get(handle: tf.Tensor, index: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    value = list_get(handle, index, tf.constant(static_sizes(spec), tf.int32), spec.dtype)
    value.set_shape(spec.shape)
    return value


def nothing(dtype: tf.DType) -> tf.Tensor:
    """The smallest value of a dtype; a variant is a list, as loops inside stages make them."""
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=0, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)
