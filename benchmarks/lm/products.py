"""The products of matrices of a step of OneBillionWordTiny, and nothing else: the limit."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.stack import quiet, set_threads

DEVICES = 2


def products_step() -> Callable[[], tuple[float]]:
    """Forward, and twice as many backward: half of the rows on each of two devices at one time."""
    quiet()
    set_threads(inter_op=DEVICES, intra_op=1, num_devices=DEVICES)
    import tensorflow as tf

    from models.one_billion_word.sizes import Tiny

    rows, time, dim = Tiny.BATCH_SIZE // DEVICES, Tiny.SEQUENCE_LENGTH, Tiny.MODEL_DIM
    heads, hidden, vocab = Tiny.NUM_HEADS, Tiny.HIDDEN_DIM, Tiny.VOCAB_SIZE
    tokens, per_head = rows * time, dim // heads
    block = [
        *[((tokens, dim), (dim, dim))] * 4,
        ((rows, heads, time, per_head), (rows, heads, per_head, time)),
        ((rows, heads, time, time), (rows, heads, time, per_head)),
        ((tokens, dim), (dim, hidden)),
        ((tokens, hidden), (hidden, dim)),
    ]
    # Of the embedding there is none.
    products = [*block * Tiny.NUM_LAYERS, ((tokens, dim), (dim, vocab))]

    def all_of(seed: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for a, b in products:
            # One element of each hangs on the one before, so that they come one after the other.
            x, w = tf.fill(a, seed + 0.0 * total), tf.fill(b, seed)
            y = tf.matmul(x, w)
            dx = tf.matmul(y, w, transpose_b=True)
            dw = tf.matmul(x, y, transpose_a=True)
            total += sum(tf.reshape(product, [-1])[0] for product in (y, dx, dw))
        return total

    @tf.function(autograph=False)
    def step(seed: tf.Tensor) -> tf.Tensor:
        totals = []
        for device in range(DEVICES):
            with tf.device(f"CPU:{device}"):
                totals.append(all_of(seed + float(device)))
        return tf.add_n(totals)

    seed = tf.Variable(1e-6)
    return lambda: (float(step(seed)),)
