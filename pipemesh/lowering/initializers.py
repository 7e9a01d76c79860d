"""Initial values that do not depend on the layout of a variable."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.randomness.draws import RawDraw, draw_block

# Number of random numbers drawn at once, so that no device holds much more than its slice.
MOST_DRAWN = 1 << 22


class Initializer(Protocol):
    """An interface that computes any block of a variable's initial value."""

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block of sizes `block` at `begin` in a variable of sizes `sizes`."""
        ...


@dataclasses.dataclass(frozen=True)
class Constant:
    """An initializer with the same number everywhere."""

    value: float = 0.0

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        del sizes, begin
        return tf.fill(list(block), tf.cast(self.value, dtype))


@dataclasses.dataclass(frozen=True)
class Normal:
    """An initializer of normal numbers with mean 0, from a seed of two integers.

    Example:
        >>> draw = Normal(stddev=0.02, seed=(1, 2))
        >>> whole = draw([4, 6], [0, 0], [4, 6], tf.float32)
        >>> part = draw([4, 6], [2, 3], [2, 3], tf.float32)
        >>> bool(tf.reduce_all(whole[2:, 3:] == part))
        True
    """

    stddev: float
    seed: tuple[int, int]

    def __post_init__(self) -> None:
        _check(self.seed, stddev=self.stddev)

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        raw = tf.raw_ops.StatelessRandomNormalV2
        return _draw(raw, sizes, begin, block, self.seed, dtype) * tf.cast(self.stddev, dtype)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """An initializer of uniform numbers in [low, high), from a seed of two integers."""

    low: float
    high: float
    seed: tuple[int, int]

    def __post_init__(self) -> None:
        _check(self.seed, low=self.low, high=self.high)

    def __call__(
        self, sizes: Sequence[int], begin: Sequence[int], block: Sequence[int], dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the block."""
        drawn = _draw(tf.raw_ops.StatelessRandomUniformV2, sizes, begin, block, self.seed, dtype)
        return drawn * tf.cast(self.high - self.low, dtype) + tf.cast(self.low, dtype)


def _check(seed: Any, **given: Any) -> None:
    for name, number in given.items():
        if not isinstance(number, numbers.Real):
            raise ShapeError(f"{name} of an initializer is {number!r}; give a number")
    if np.shape(seed) != (2,) or not all(isinstance(part, numbers.Integral) for part in seed):
        raise ShapeError(f"seed of an initializer is {seed!r}; give two integers, as in (1, 2)")


def _draw(
    raw: RawDraw,
    sizes: Sequence[int],
    begin: Sequence[int],
    block: Sequence[int],
    seed: tuple[int, int],
    dtype: tf.DType,
) -> tf.Tensor:
    """Draws a block, a few rows at a time if dims behind the first are split."""

    def draw(first: Sequence[int], rows: Sequence[int]) -> tf.Tensor:
        return draw_block(raw, sizes, first, rows, tf.constant(seed, tf.int64), dtype)

    def pieces(dim: int, first: list[int], rows: list[int]) -> tf.Tensor:
        behind = math.prod(sizes[dim + 1 :])
        drawn = rows[dim] * behind
        if drawn <= MOST_DRAWN or list(rows[dim + 1 :]) == list(sizes[dim + 1 :]):
            return draw(first, rows)
        step = max(1, MOST_DRAWN // behind)
        parts: list[tf.Tensor] = []
        for start in range(0, rows[dim], step):
            size = min(step, rows[dim] - start)
            here = [*first[:dim], first[dim] + start, *first[dim + 1 :]]
            some = [*rows[:dim], size, *rows[dim + 1 :]]
            parts.append(pieces(dim + 1, here, some) if size == 1 else draw(here, some))
        return tf.concat(parts, dim)

    if not block or math.prod(block) == 0:
        return draw(begin, block)
    return pieces(0, list(begin), list(block))
