"""Shapes and dtypes that are known before anything runs, and reshapes by them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

# The shape and dtype behind a handle are not public; the TensorFlow version is pinned to 2.21.
from tensorflow.python.ops import handle_data_util


def static_sizes(value: tf.Tensor | tf.TensorSpec) -> list[int]:
    """Returns the size of each dim of a tensor whose shape is fully known."""
    sizes = value.shape.as_list()
    known = [size for size in sizes if size is not None]
    assert len(known) == len(sizes), f"a static shape is needed, not {value.shape}"
    return known


def split_to_front(tensor: tf.Tensor, dim: int, count: int) -> tf.Tensor:
    """Cuts a dim of a tensor into equal parts, and stacks them along a new first dim."""
    sizes = static_sizes(tensor)
    cut = tf.reshape(tensor, [*sizes[:dim], count, sizes[dim] // count, *sizes[dim + 1 :]])
    return tf.transpose(cut, [dim, *range(dim), *range(dim + 1, len(sizes) + 1)])


def join_from_front(parts: tf.Tensor, dim: int) -> tf.Tensor:
    """Joins parts along a dim that they have, as `split_to_front` cuts and stacks them."""
    count, *sizes = static_sizes(parts)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
    sizes[dim] *= count
    return tf.reshape(tf.transpose(parts, order) if dim else parts, sizes)


def static_vector(shape: Any) -> Any:
    """Returns the values of a shape vector, even one concatenated from others; None if unknown."""
    value = tf.get_static_value(shape)
    if value is None:
        # TensorFlow infers shapes from more operations than it looks values up in.
        inferred = tf.fill(shape, False).shape
        value = np.array(inferred.as_list()) if inferred.is_fully_defined() else None
    return value


def num_bytes(values: Iterable[tf.Tensor | tf.TensorSpec | tf.Variable]) -> int:
    """Returns the memory that values of these shapes and dtypes take."""
    return sum(value.shape.num_elements() * value.dtype.size for value in values)


def dtype_behind(handle: tf.Tensor) -> tf.DType | None:
    """Returns the dtype of the variable behind a handle, None if unknown."""
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def stand_for_alike(handle: tf.Tensor, variable: tf.Variable) -> None:
    """Notes on a symbolic handle that it stands for a variable like this one."""
    # Without the note a function that takes the handle cannot be differentiated twice.
    handle_data_util.copy_handle_data(variable.handle, handle)
