"""Buffers of a loop as TensorFlow lists: values put and taken by an index."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import list_get, list_set
from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.remat import FULL, Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.batch import join_stacked
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.values import Channel, Kind


class Key(NamedTuple):
    """The kind of a value, its stage, and the mode of remat that it depends on."""

    kind: Kind[Any]
    stage: int
    mode: Mode


def key_of(channel: Channel, mode: Mode = FULL) -> Key:
    """Returns the key of a channel; only KEPT and PENDING depend on the mode."""
    return Key(*channel, mode if channel.kind.by_mode else FULL)


class Buffers:
    """The buffers of a run; each holds values of one tensor, or of one dtype.

    A put makes a new list, which shares all other elements with the old one.

    Args:
        machine: provides shapes.
        stages: the stages.
        sizes: of each buffer, its maximum number of values.

    Attributes:
        handles: the lists of each channel, with None for a tensor that does not exist; and lists
            with other names.
        elsewhere: the devices of buffers that are not on the device that makes their values.
    """

    def __init__(self, machine: Machine, stages: Sequence[Stage], sizes: Mapping[Any, int]) -> None:
        self.handles: dict[Any, Grads] = {}
        self.elsewhere: dict[Key, list[str]] = {}
        self._machine = machine
        self._stages = stages
        self._sizes = sizes

    def reserve(self, key: Key) -> None:
        """Makes the lists of a channel unless they exist."""
        if key not in self.handles:
            self.handles[key] = [
                None if spec is None else self._empty(device, spec.dtype, key)
                for spec, device in zip(self._machine.specs(*key), self._devices(key), strict=True)
            ]

    def reserve_one(self, name: Hashable, dtype: tf.DType, device: str) -> None:
        """Makes a list for values of any shape unless it exists."""
        if name not in self.handles:
            self.handles[name] = [self._empty(device, dtype, name)]

    def _devices(self, key: Key) -> list[str]:
        if key in self.elsewhere:
            return self.elsewhere[key]
        devices = self._stages[key.stage].devices
        return [devices[place] for place in self._machine.places(*key)]

    def _empty(self, device: str, dtype: tf.DType, name: Hashable) -> tf.Tensor:
        with tf.device(device):
            # Of any shape, because cleared elements have another one.
            return tf.raw_ops.TensorListReserve(
                element_shape=tf.constant(-1),
                num_elements=tf.constant(self._sizes[name]),
                element_dtype=dtype,
            )

    def put(self, key: Key, index: tf.Tensor, values: Sequence[tf.Tensor | None]) -> None:
        """Puts the tensors of a value at an index, an int32 scalar."""
        handles = zip(self.handles[key], values, self._devices(key), strict=True)
        self.handles[key] = [
            handle if handle is None or value is None else _put(handle, index, value, device)
            for handle, value, device in handles
        ]

    def take(self, key: Key, index: tf.Tensor) -> Grads:
        """Takes the tensors of a value, so that the buffer no longer holds them."""
        known = zip(self.handles[key], self._machine.specs(*key), self._devices(key), strict=True)
        values: Grads = []
        cleared: Grads = []
        for handle, spec, device in known:
            with tf.device(device):
                if handle is None or spec is None:
                    values.append(None)
                    cleared.append(None)
                else:
                    values.append(_get(handle, index, spec))
                    cleared.append(nothing(spec.dtype))
        self.put(key, index, cleared)
        return values

    def joined(self, key: Key, cutting: Cutting) -> Grads:
        """Returns the values of all pieces and replicas, joined to the whole batch."""
        stage = self._stages[key.stage]
        specs, handles = self._machine.specs(*key), self.handles[key]
        devices, count = self._devices(key), len(specs) // stage.of_home.num_replicas
        joined: Grads = []
        for i in range(count):
            stacked = [
                _stacked(handle, spec, cutting.num_pieces, device)
                for handle, device in zip(handles[i::count], devices[i::count], strict=True)
                if handle is not None and (spec := specs[i]) is not None
            ]
            with tf.device(devices[i]):
                joined.append(join_stacked(stacked, cutting) if stacked else None)
        return joined


def _stacked(handle: tf.Tensor, spec: tf.TensorSpec, count: int, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.raw_ops.TensorListStack(
            input_handle=handle,
            element_shape=tf.constant(static_sizes(spec), tf.int32),
            element_dtype=spec.dtype,
            num_elements=count,
        )


def _put(handle: tf.Tensor, index: tf.Tensor, value: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return list_set(handle, index, value)


def _get(handle: tf.Tensor, index: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    value = list_get(handle, index, tf.constant(static_sizes(spec), tf.int32), spec.dtype)
    value.set_shape(spec.shape)
    return value


def nothing(dtype: tf.DType) -> tf.Tensor:
    """Returns the smallest value of a dtype; a variant is a list, as loops in stages make."""
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=0, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)
