"""Tensors with one row per time step, written row by row."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


class Rows:
    """Storage that a loop writes row by row, as one loop variable each.

    Unlike in a `tf.TensorArray`, the shape of a row may be unknown until the step runs. If no row
    was written, the result is still a tensor of zeros.

    Args:
        row_shape: int32 vector; -1 for a size that is unknown before the first row is written.
        static_shape: the static shape of a row.
        dtype: the dtype.
        size: int32 scalar, the number of rows.
    """

    def __init__(
        self,
        row_shape: tf.Tensor | np.ndarray,
        static_shape: tf.TensorShape,
        dtype: tf.DType,
        size: tf.Tensor,
    ) -> None:
        self._row_shape = row_shape
        self._static_shape = static_shape
        self._dtype = dtype
        self._size = size

    @classmethod
    def like(cls, row: tf.Tensor, size: tf.Tensor) -> Rows:
        """Returns rows of the shape and dtype of a tensor."""
        return cls(tf.shape(row), row.shape, row.dtype, size)

    def new(self) -> tf.Tensor:
        """Returns a handle of rows of zeros."""
        return tf.raw_ops.TensorListReserve(
            element_shape=self._row_shape, num_elements=self._size, element_dtype=self._dtype
        )

    def write(self, handle: tf.Tensor, number: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        """Returns the handle of the rows with one row replaced."""
        return tf.raw_ops.TensorListSetItem(input_handle=handle, index=number, item=row)

    def read(self, handle: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Returns one row."""
        row = tf.raw_ops.TensorListGetItem(
            input_handle=handle,
            index=number,
            element_shape=self._row_shape,
            element_dtype=self._dtype,
        )
        return tf.ensure_shape(row, self._static_shape)

    def stack(self, handle: tf.Tensor) -> tf.Tensor:
        """Returns all rows as one tensor; unwritten rows are zeros."""
        stacked = tf.raw_ops.TensorListStack(
            input_handle=handle, element_shape=self._row_shape, element_dtype=self._dtype
        )
        size = tf.get_static_value(self._size)
        return tf.ensure_shape(stacked, tf.TensorShape([size]).concatenate(self._static_shape))
