"""Positions of tokens as numbers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Slower rotations, for longer sequences than a model was first trained with.

    Without `length` all rotations are slower (Chen et al., "Position Interpolation", 2023). With
    it, as in Llama 3.1 (Dubey et al., 2024), the number of turns within `length` positions decides.
    Below `low` turns rotations are slower, above `high` turns they are unchanged, and between them
    the change is linear.

    Attributes:
        factor: the factor by which rotations are slower; 1 or more.
        length: the length of the first sequences, in tokens.
        low: see above.
        high: see above; more than `low`.

    Raises:
        PipelineError: a number is out of range.

    Example:
        >>> RotaryScaling(4.0).speeds(1e4, 2).tolist()
        [0.25, 0.25]
        >>> RotaryScaling(4.0, length=64, low=1.0, high=4.0).speeds(1e4, 2).tolist()
        [1.0, 0.25]
    """

    factor: float
    length: int | None = None
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise PipelineError(f"RotaryScaling: factor is {self.factor!r}; it must be 1 or more")
        if self.length is not None and self.length < 1:
            raise PipelineError(f"RotaryScaling: length is {self.length!r}; it must be 1 or more")
        if not 0 < self.low < self.high:
            raise PipelineError(
                f"RotaryScaling: low is {self.low!r} and high {self.high!r}; both must be above 0, "
                "and high the greater one"
            )

    def speeds(self, base: float, number: int) -> np.ndarray:
        """Returns each pair's speed relative to no scaling; `base` as in `rotated`."""
        kept = np.zeros([number])
        if self.length is not None:
            turns = self.length * base ** (-np.arange(number) / number) / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept + (1 - kept) / self.factor


def sinusoids(positions: tf.Tensor, dim: int) -> tf.Tensor:
    """Returns sines, then cosines, of positions at wavelengths from 2 pi to 20,000 pi.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.5. `dim` is even.

    Example:
        >>> sinusoids(tf.constant([0, 1]), 2).numpy().round(2).tolist()
        [[0.0, 1.0], [0.8399999737739563, 0.5400000214576721]]
    """
    angles = _angles(positions, dim // 2, 1e4, max(dim // 2 - 1, 1))
    return tf.concat([tf.sin(angles), tf.cos(angles)], -1)


def rotated(
    x: tf.Tensor, positions: tf.Tensor, base: float, scaling: RotaryScaling | None = None
) -> tf.Tensor:
    """Rotates pairs of elements by angles that grow with the position.

    Products of two rotated vectors depend on the distance of their positions. Element `i` of the
    first half makes a pair with element `i` of the second one. Source: Su et al., "RoFormer", 2021.

    Args:
        x: `[batch, length, heads, dim]`; `dim` is even.
        positions: `[batch, length]`, or `[length]`, integers.
        base: the longest wavelength is almost 2 pi times this.
        scaling: scaling of the angles.
    """
    half = static_sizes(x)[-1] // 2
    angles = tf.expand_dims(_angles(positions, half, base, half), -2)
    if scaling is not None:
        angles *= tf.constant(scaling.speeds(base, half), tf.float32)
    sines, cosines = tf.sin(angles), tf.cos(angles)
    first, second = tf.split(tf.cast(x, tf.float32), 2, axis=-1)
    turned = [first * cosines - second * sines, second * cosines + first * sines]
    return tf.cast(tf.concat(turned, -1), x.dtype)


def _angles(positions: tf.Tensor, number: int, base: float, steps: int) -> tf.Tensor:
    powers = tf.range(number, dtype=tf.float32) / steps
    return tf.expand_dims(tf.cast(positions, tf.float32), -1) * tf.exp(-math.log(base) * powers)
