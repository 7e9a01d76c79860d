"""A group of prompts: the state of its rows between two calls of a generator."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Group(NamedTuple):
    """The state of a group's rows, all on their devices.

    Attributes:
        tokens: `[rows]` int32, the last tokens, which have not passed the stages yet.
        places: `[rows]` int32, the positions of these tokens.
        state: the tensor that the next choice depends on.
        kept: the caches of the stages, in the generator's form.
    """

    tokens: tf.Tensor
    places: tf.Tensor
    state: tf.Tensor
    kept: Any


def rows_of(chosen: tf.Tensor, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `new` where `chosen` is true, else those of `old`."""
    with tf.device(new.device):
        return tf.where(tf.reshape(chosen, [-1] + [1] * (new.shape.rank - 1)), new, old)
