"""Where a token stands, as numbers."""

from __future__ import annotations

import math

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes


def sinusoids(positions: tf.Tensor, dim: int) -> tf.Tensor:
    """Sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.5.

    Args:
        positions: integers.
        dim: even.

    Returns:
        float32, with `dim` numbers for each position.

    Example:
        >>> sinusoids(tf.constant([0, 1]), 2).numpy().round(2).tolist()
        [[0.0, 1.0], [0.8399999737739563, 0.5400000214576721]]
    """
    angles = _angles(positions, dim // 2, 1e4, max(dim // 2 - 1, 1))
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)


def rotated(x: tf.Tensor, positions: tf.Tensor, base: float) -> tf.Tensor:
    """Turns pairs of elements by angles that grow with the position.

    Products of two rotated vectors depend on the distance of their positions. Element `i` of the
    first half makes a pair with element `i` of the second one. Source: Su et al., "RoFormer", 2021.

    Args:
        x: `[batch, length, heads, dim]`; `dim` is even.
        positions: `[batch, length]`, or `[length]`, integers.
        base: the longest wavelength is almost 2 pi times this.
    """
    half = static_sizes(x)[-1] // 2
    angles = tf.expand_dims(_angles(positions, half, base, half), -2)
    sines, cosines = tf.sin(angles), tf.cos(angles)
    first, second = tf.split(tf.cast(x, tf.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return tf.cast(tf.concat(turned, -1), x.dtype)


def _angles(positions: tf.Tensor, number: int, base: float, steps: int) -> tf.Tensor:
    powers = tf.range(number, dtype=tf.float32) / steps
    return tf.expand_dims(tf.cast(positions, tf.float32), -1) * tf.exp(-math.log(base) * powers)
