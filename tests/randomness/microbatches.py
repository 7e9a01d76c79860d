"""A draw of the whole batch, and those of its microbatches."""

import tensorflow as tf

from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.randomness.scope import Position, WholeDraw, WholeDraws

STEP = tf.constant(3, tf.int64)


def whole_and_parts(draw, whole_shape, micro_shape, num_microbatches, size=None, before=None):
    with plan_free_randomness(STEP) as drawn, layer_scope("layer"):
        whole = draw(whole_shape)
    parts = []
    for m in range(num_microbatches):
        position = Position(
            tf.constant(m, tf.int64),
            num_microbatches,
            size or micro_shape[0],
            WholeDraws(drawn, lambda name, dim, folded: before),
        )
        with plan_free_randomness(STEP, position), layer_scope("layer"):
            parts.append(draw(micro_shape).numpy())
    return whole.numpy(), parts


def position(whole_shapes, num_microbatches=2, layer="noisy"):
    drawn = {f"{layer}:{i}": WholeDraw(sizes) for i, sizes in enumerate(whole_shapes or ())}
    whole = None if whole_shapes is None else WholeDraws(drawn, lambda name, dim, folded: 1)
    return Position(tf.constant(0, tf.int64), num_microbatches, 2, whole)
