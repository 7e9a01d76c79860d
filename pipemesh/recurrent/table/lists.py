"""Values of all microbatches, by their number, where that is known only when the step runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.machine import Machine

# A kind of value, its stage, and the mode of remat it depends on.
Key = tuple[str, int, str]


class Lists:
    """A list of tensors for each tensor of each channel, with one element a microbatch.

    They are TensorFlow's own list values: what is put makes a new list, which shares all other
    elements with the old one.

    Args:
        machine: knows shapes.
        stages: the stages.
        num_microbatches: how many elements there are.

    Attributes:
        handles: of each channel the lists, None in place of a tensor that does not exist.
    """

    def __init__(self, machine: Machine, stages: Sequence[Stage], num_microbatches: int) -> None:
        self.handles: dict[Key, list[tf.Tensor | None]] = {}
        self._machine = machine
        self._stages = stages
        self._num_microbatches = num_microbatches

    @staticmethod
    def key(kind: str, stage: int, mode: str) -> Key:
        """The key of a channel; only what is kept depends on the mode."""
        return kind, stage, mode if kind in ("kept", "pending") else ""

    def reserve(self, keys: Iterable[Key]) -> None:
        """Makes the lists that do not exist yet."""
        for key in keys:
            if key not in self.handles:
                self.handles[key] = [
                    None if spec is None else self._empty(key[1], spec)
                    for spec in self._machine.specs(*key)
                ]

    def _empty(self, stage: int, spec: tf.TensorSpec) -> tf.Tensor:
        with tf.device(self._stages[stage].device):
            # Of any shape, because cleared elements have another one.
            return tf.raw_ops.TensorListReserve(
                element_shape=tf.constant(-1),
                num_elements=tf.constant(self._num_microbatches),
                element_dtype=spec.dtype,
            )

    def put(self, key: Key, microbatch: tf.Tensor, values: Sequence[tf.Tensor | None]) -> None:
        """Puts values in the place of a microbatch."""
        self.reserve([key])
        self._set(key, microbatch, values)

    def _set(self, key: Key, microbatch: tf.Tensor, values: Sequence[tf.Tensor | None]) -> None:
        with tf.device(self._stages[key[1]].device):
            index = tf.cast(microbatch, tf.int32)
            self.handles[key] = [
                handle
                if handle is None or value is None
                else tf.raw_ops.TensorListSetItem(input_handle=handle, index=index, item=value)
                for handle, value in zip(self.handles[key], values, strict=True)
            ]

    def take(self, key: Key, microbatch: tf.Tensor) -> list[tf.Tensor | None]:
        """Takes the values of a microbatch, so that the list no longer holds them."""
        specs = self._machine.specs(*key)
        with tf.device(self._stages[key[1]].device):
            index = tf.cast(microbatch, tf.int32)
            values = [
                None if handle is None or spec is None else _get(handle, index, spec)
                for handle, spec in zip(self.handles[key], specs, strict=True)
            ]
            cleared = [None if v is None else _nothing(v.dtype) for v in values]
        self._set(key, microbatch, cleared)
        return values

    def joined(self, key: Key, batch_dim: int) -> list[tf.Tensor | None]:
        """The values of all microbatches, as those of the whole batch."""
        specs = self._machine.specs(*key)
        with tf.device(self._stages[key[1]].device):
            return [
                None if handle is None or spec is None else self._join(handle, spec, batch_dim)
                for handle, spec in zip(self.handles[key], specs, strict=True)
            ]

    def _join(self, handle: tf.Tensor, spec: Any, batch_dim: int) -> tf.Tensor:
        shape = spec.shape.as_list()
        stacked = tf.raw_ops.TensorListStack(
            input_handle=handle,
            element_shape=tf.constant(shape, tf.int32),
            element_dtype=spec.dtype,
            num_elements=self._num_microbatches,
        )
        if not shape:
            return tf.ensure_shape(stacked, [self._num_microbatches])
        order = [*range(1, batch_dim + 1), 0, *range(batch_dim + 1, len(shape) + 1)]
        if batch_dim:
            stacked = tf.transpose(stacked, order)
        shape[batch_dim] *= self._num_microbatches
        return tf.reshape(stacked, shape)


def _get(handle: tf.Tensor, index: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    value = tf.raw_ops.TensorListGetItem(
        input_handle=handle,
        index=index,
        element_shape=tf.constant(spec.shape.as_list(), tf.int32),
        element_dtype=spec.dtype,
    )
    value.set_shape(spec.shape)
    return value


def _nothing(dtype: tf.DType) -> tf.Tensor:
    """The smallest value of a dtype; a variant is a list, as loops inside stages make them."""
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=0, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)
