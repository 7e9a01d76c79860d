"""Blocks of a random draw, without drawing all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.randomness.draws import PHILOX, advance_counter, keyed

# One of the generated operations `StatelessRandom...V2`, called with keywords.
RawDraw = Callable[..., Any]


def draw_block(
    raw: RawDraw,
    sizes: Sequence[int],
    begin: Sequence[tf.Tensor | int],
    block: Sequence[int],
    seed: tf.Tensor,
    dtype: tf.DType,
) -> tf.Tensor:
    """Draws a block of a tensor of random numbers.

    Where only leading dims are cut, no other numbers are computed: Philox counts groups of numbers,
    so a draw can start anywhere (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
    2011). Of the dims behind, all numbers are drawn and the block is cut out.

    Args:
        raw: draws with keywords shape, key, counter, alg and dtype.
        sizes: of the whole tensor.
        begin: where the block begins: for each dim a number, or an int32 scalar.
        block: the sizes of the block.
        seed: two integers.
        dtype: of the numbers.

    Returns:
        The block of exactly the tensor that would be drawn as a whole.
    """
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    def draw(shape: Sequence[int], first: tf.Tensor) -> tf.Tensor:
        return keyed(
            raw(
                shape=tf.constant(shape, tf.int32, shape=[len(shape)]),
                key=key,
                counter=first,
                alg=PHILOX,
                dtype=dtype,
            )
        )

    if math.prod(block) == 0:
        return tf.zeros(block, dtype)
    if list(sizes) == list(block):
        return draw(sizes, counter)
    # Leading dims: those up to the first of which the block has more than one element.
    lead = next((i for i, size in enumerate(block) if size > 1), len(block) - 1) + 1
    # A count gives 128 bits, and no number takes fewer than 32 of them.
    group = 16 // max(4, dtype.size)
    begin = [_known(at) for at in begin]
    strides = [math.prod(sizes[i + 1 :]) for i in range(lead)]
    drawn = [*block[:lead], *sizes[lead:]]
    if all(isinstance(at, int) or s % group == 0 for at, s in zip(begin, strides, strict=False)):
        # Where the block begins within a group is known before it is drawn; mostly at its start.
        fixed = sum(at * s for at, s in zip(begin, strides, strict=False) if isinstance(at, int))
        moved = [
            tf.cast(at, tf.int64) * (s // group)
            for at, s in zip(begin, strides, strict=False)
            if not isinstance(at, int)
        ]
        steps, skipped = divmod(fixed, group)
        if steps:
            moved.append(tf.constant(steps, tf.int64))
        first = advance_counter(counter, tf.add_n(moved)) if moved else counter
    else:
        start = sum(tf.cast(at, tf.int64) * s for at, s in zip(begin, strides, strict=False))
        first, skipped = advance_counter(counter, start // group), tf.math.floormod(start, group)
    if isinstance(skipped, int) and skipped == 0:
        numbers = draw(drawn, first)
    else:
        run = math.prod(drawn)
        numbers = draw([run + group - 1], first)
        numbers = tf.reshape(tf.slice(numbers, [skipped], [run]), drawn)
    if drawn == list(block):
        return numbers
    return tf.slice(numbers, [*[0] * lead, *begin[lead:]], block)


def _known(at: tf.Tensor | int) -> tf.Tensor | int:
    """A number that is known before anything runs as one of Python."""
    value = at if isinstance(at, int) else tf.get_static_value(at)
    return at if value is None else int(value)
