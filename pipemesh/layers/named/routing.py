"""Assignment of tokens to slots of experts."""

from __future__ import annotations

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes


def places_of(experts: tf.Tensor, skipped: tf.Tensor | None, number: int, room: int) -> tf.Tensor:
    """Gives each choice of each token a slot while its expert has capacity, or -1.

    First choices come before second ones, and earlier tokens before later ones. Rows of a batch are
    independent.

    Args:
        experts: `[batch, length, choices]` int32, the experts that each token chose.
        skipped: `[batch, length]` booleans, tokens without an expert; None if there are none.
        number: the number of experts.
        room: the number of tokens of a row that an expert takes.

    Returns:
        `[batch, length, choices]` int32: slot `expert * room + i`, or -1 beyond the capacity.

    Example:
        >>> places_of(tf.constant([[[0], [1], [0], [0]]]), None, number=2, room=2).numpy().tolist()
        [[[0], [2], [1], [-1]]]
    """
    batch, length, choices = static_sizes(experts)
    # All first choices, then all second ones.
    queue = tf.reshape(tf.transpose(experts, [0, 2, 1]), [batch, choices * length])
    takes = tf.one_hot(queue, number, dtype=tf.int32)
    if skipped is not None:
        real = tf.tile(1 - tf.cast(skipped, tf.int32), [1, choices])
        takes *= tf.expand_dims(real, -1)
    before = tf.reduce_sum(tf.cumsum(takes, 1, exclusive=True) * takes, -1)
    finds = (before < room) & (tf.reduce_sum(takes, -1) > 0)
    places = tf.where(finds, queue * room + before, -1)
    return tf.transpose(tf.reshape(places, [batch, choices, length]), [0, 2, 1])


def tokens_of(places: tf.Tensor, slots: int) -> tf.Tensor:
    """Returns the token in each slot, `[batch, slots]`, or -1 for empty slots; inverts `places_of`.

    Example:
        >>> tokens_of(tf.constant([[[0], [2], [1], [-1]]]), 4).numpy().tolist()
        [[0, 2, 1, -1]]
    """
    batch, length, choices = static_sizes(places)
    rows = tf.broadcast_to(tf.range(batch)[:, None, None], places.shape)
    tokens = tf.broadcast_to(tf.range(length)[None, :, None], places.shape)
    # Tokens without a slot go to an extra slot, which is cut off.
    columns = tf.where(places < 0, slots, places)
    at = tf.reshape(tf.stack([rows, columns], -1), [batch * length * choices, 2])
    empty = tf.fill([batch, slots + 1], -1)
    filled = tf.tensor_scatter_nd_update(empty, at, tf.reshape(tokens, [-1]))
    return filled[:, :slots]
