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
    begin: Sequence[tf.Tensor],
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
        begin: where the block begins: an int32 scalar for each dim.
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
    rest = math.prod(sizes[lead:])
    run = block[lead - 1] * rest
    start = tf.zeros([], tf.int64)
    for at, size in zip(begin[:lead], sizes[:lead], strict=True):
        start = start * size + tf.cast(at, tf.int64)
    start = start * rest
    advanced = advance_counter(counter, start // group)
    numbers = draw([run + group - 1], advanced)
    numbers = tf.slice(numbers, [tf.math.floormod(start, group)], [run])
    numbers = tf.reshape(numbers, [*block[:lead], *sizes[lead:]])
    return tf.slice(numbers, tf.stack([*[tf.constant(0)] * lead, *begin[lead:]]), block)
