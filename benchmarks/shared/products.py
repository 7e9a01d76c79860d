"""The products of matrices of a step, and nothing else: the limit of what devices compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shared.stack import Stack

# The shapes of two matrices, or of stacks of them.
Product = tuple[tuple[int, ...], tuple[int, ...]]


def of_language_model(sizes: Any, rows: int) -> list[Product]:
    """The products of a forward pass of a language model of these sizes, for some rows of text."""
    time, dim = sizes.SEQUENCE_LENGTH, sizes.MODEL_DIM
    tokens, per_head = rows * time, dim // sizes.NUM_HEADS
    block: list[Product] = [
        *[((tokens, dim), (dim, dim))] * 4,
        ((rows, sizes.NUM_HEADS, time, per_head), (rows, sizes.NUM_HEADS, per_head, time)),
        ((rows, sizes.NUM_HEADS, time, time), (rows, sizes.NUM_HEADS, time, per_head)),
        ((tokens, dim), (dim, sizes.HIDDEN_DIM)),
        ((tokens, sizes.HIDDEN_DIM), (sizes.HIDDEN_DIM, dim)),
    ]
    # Of the embedding there is none.
    return [*block * sizes.NUM_LAYERS, ((tokens, dim), (dim, sizes.VOCAB_SIZE))]


def of_stack(stack: Stack) -> list[Product]:
    """The products of a forward pass of all blocks."""
    dim, hidden = stack.dim, stack.hidden
    return [
        ((stack.rows, dim), (dim, hidden)),
        ((stack.rows, hidden), (hidden, dim)),
    ] * stack.blocks


def flops_of(products: Sequence[Product], to_inputs: bool = True) -> int:
    """The floating-point operations of a step: forward, and twice as many backward."""
    each = [2 * math.prod(a) * b[-1] for a, b in products]
    return 3 * sum(each) - (0 if to_inputs else each[0])


def products_step(
    products: Sequence[Product], devices: Sequence[str], to_inputs: bool = True
) -> Callable[[], tuple[float]]:
    """Forward, and twice as many backward: all products on each of the devices at one time.

    Args:
        products: those of a forward pass.
        devices: which compute all of them.
        to_inputs: whether the inputs of the first product have a gradient.

    Returns:
        A function that computes a step.
    """
    import tensorflow as tf

    def all_of(seed: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for number, (a, b) in enumerate(products):
            # One element of each hangs on the one before, so that they come one after the other.
            x, w = tf.fill(a, seed + 0.0 * total), tf.fill(b, seed)
            y = tf.matmul(x, w)
            found = [y, tf.matmul(x, y, transpose_a=True)]
            if number or to_inputs:
                found.append(tf.matmul(y, w, transpose_b=True))
            total += sum(tf.reshape(product, [-1])[0] for product in found)
        return total

    @tf.function(autograph=False)
    def step(seed: tf.Tensor) -> tf.Tensor:
        totals = []
        for number, device in enumerate(devices):
            with tf.device(device):
                totals.append(all_of(seed + float(number)))
        return tf.add_n(totals)

    seed = tf.Variable(1e-6)
    return lambda: (float(step(seed)),)
