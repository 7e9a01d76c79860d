"""Attention of a few tokens to a cache, on one device."""

from __future__ import annotations

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.layers.named.block_attention import LOW, Buckets


def cached_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    places: tf.Tensor,
    table: tf.Tensor | None = None,
    buckets: Buckets | None = None,
) -> tf.Tensor:
    """Averages the values that each query sees: those up to its own position.

    Args:
        q: `[batch, length, heads, dim]`, scaled.
        k: `[batch, kv_heads, cache, dim]`; `heads / kv_heads` neighbouring heads share one.
        v: like `k`.
        places: `[batch, length]` int32, the position of each query in the cache.
        table: `[buckets, heads]`, added to scores.
        buckets: selects the row of the table.

    Example:
        >>> ones = tf.ones([1, 1, 1, 2])
        >>> v = tf.constant([[[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]]])
        >>> cached_attention(ones, tf.ones([1, 1, 3, 2]), v, tf.constant([[1]])).numpy().tolist()
        [[[[2.0, 3.0]]]]
    """
    batch, length, heads, dim = static_sizes(q)
    kv_heads, cache = static_sizes(k)[1:3]
    shared = heads // kv_heads
    # Heads that share keys are rows of one matmul.
    queries = tf.reshape(q, [batch, length, kv_heads, shared, dim])
    queries = tf.reshape(tf.transpose(queries, [0, 2, 3, 1, 4]), [batch, kv_heads, -1, dim])
    scores = tf.cast(tf.matmul(queries, k, transpose_b=True), tf.float32)
    scores = tf.reshape(scores, [batch, kv_heads, shared, length, cache])
    distance = tf.expand_dims(places, 2) - tf.range(cache)
    if table is not None:
        assert buckets is not None
        bias = tf.gather(tf.cast(table, tf.float32), buckets.of(distance))
        bias = tf.reshape(bias, [batch, length, cache, kv_heads, shared])
        scores += tf.transpose(bias, [0, 3, 4, 1, 2])
    seen = tf.reshape(distance >= 0, [batch, 1, 1, length, cache])
    weights = tf.nn.softmax(tf.where(seen, scores, LOW))
    weights = tf.reshape(tf.cast(weights, v.dtype), [batch, kv_heads, shared * length, cache])
    found = tf.reshape(tf.matmul(weights, v), [batch, kv_heads, shared, length, dim])
    return tf.reshape(tf.transpose(found, [0, 3, 1, 2, 4]), [batch, length, heads, dim])
