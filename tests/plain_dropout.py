"""Dropout on one device, as `ops.dropout` computes it under every layout."""

import math

import tensorflow as tf


def plain_dropout(x, rate, seed, noise_shape=None):
    """Drops elements whose 16 bits are below the rate; the low half of each 32 bits comes first."""
    sizes, philox = noise_shape or x.shape, 1
    number = math.prod(sizes)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    pairs = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[(number + 1) // 2], key=key, counter=counter, alg=philox, dtype=tf.uint32
    )
    bits = tf.reshape(tf.stack([pairs % 65536, pairs // 65536], -1), [-1])[:number]
    dropped = round(rate * 65536)
    is_kept = tf.reshape(bits >= tf.constant(dropped, tf.uint32), sizes)
    return tf.where(is_kept, x * (1 / (1 - dropped / 65536)), 0)
