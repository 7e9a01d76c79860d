"""Shapes that are known before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


def static_sizes(value: tf.Tensor | tf.TensorSpec) -> list[int]:
    """The size of each dim of something whose shape is known whole."""
    sizes = value.shape.as_list()
    known = [size for size in sizes if size is not None]
    assert len(known) == len(sizes), f"a static shape is needed, not {value.shape}"
    return known


def static_vector(shape: Any) -> Any:
    """The values of a shape vector, also of one put together from others; None if unknown."""
    value = tf.get_static_value(shape)
    if value is None:
        # TensorFlow infers shapes from more operations than it looks values up in.
        inferred = tf.fill(shape, False).shape
        value = np.array(inferred.as_list()) if inferred.is_fully_defined() else None
    return value


def num_bytes(values: Iterable[tf.Tensor | tf.TensorSpec | tf.Variable]) -> int:
    """How much memory things of these shapes and dtypes take.

    Example:
        >>> num_bytes([tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int64)])
        32
    """
    return sum(value.shape.num_elements() * value.dtype.size for value in values)
