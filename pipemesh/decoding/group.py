"""The rows of a group between two calls of a generator."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Group(NamedTuple):
    """What is known of the rows of a group, all on their devices.

    Attributes:
        tokens: `[rows]` int32, the last ones, which nothing has been computed of.
        places: `[rows]` int32, where they stand.
        state: what the next choice depends on.
        kept: what stages remember of the tokens before, as the generator has it.
    """

    tokens: tf.Tensor
    places: tf.Tensor
    state: tf.Tensor
    kept: Any


def rows_of(chosen: tf.Tensor, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Some rows of one tensor, and the others of another one, where these lie.

    Args:
        chosen: `[rows]`, bool: those of `new`.
        new: `[rows, ...]`.
        old: like `new`.
    """
    with tf.device(new.device):
        return tf.where(tf.reshape(chosen, [-1] + [1] * (new.shape.rank - 1)), new, old)
