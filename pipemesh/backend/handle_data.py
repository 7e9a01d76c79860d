"""What the handle of a variable stands for."""

from __future__ import annotations

import tensorflow as tf

# Shape and dtype of what a handle stands for are not public; the TensorFlow version is pinned.
from tensorflow.python.ops import handle_data_util


def dtype_behind(handle: tf.Tensor) -> tf.DType | None:
    """The dtype of the variable that a handle stands for; None if it is not known."""
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or not data.shape_and_type:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def stand_for_alike(handle: tf.Tensor, variable: tf.Variable) -> None:
    """Notes on a symbolic handle that it stands for such a variable.

    Without the note a function that takes the handle cannot be differentiated twice.
    """
    handle_data_util.copy_handle_data(variable.handle, handle)
