"""Shapes that are known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


def static_sizes(value: tf.Tensor | tf.TensorSpec) -> list[int]:
    """The size of each dim of something whose shape is known whole."""
    sizes = value.shape.as_list()
    known = [size for size in sizes if size is not None]
    assert len(known) == len(sizes), f"a static shape is needed, not {value.shape}"
    return known


def num_bytes(values: Iterable[tf.Tensor | tf.TensorSpec | tf.Variable]) -> int:
    """How much memory things of these shapes and dtypes take.

    Example:
        >>> num_bytes([tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int64)])
        32
    """
    return sum(value.shape.num_elements() * value.dtype.size for value in values)
