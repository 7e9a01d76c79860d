"""A draw of the whole batch, and those of its microbatches."""

import tensorflow as tf

from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.randomness.scope import Position, WholeDraw, WholeDraws

STEP = tf.constant(3, tf.int64)


def whole_and_parts(draw, whole_shape, micro_shape, num_microbatches, size=None, before=None):
    with plan_free_randomness(STEP) as drawn, layer_scope("layer"):
        whole = draw(whole_shape)
    known = WholeDraws(drawn, lambda name, dim, folded: before)

    # As in a pipeline, the number of the microbatch is known only at run time.
    @tf.function(autograph=False)
    def part(m):
        position = Position(m, num_microbatches, size or micro_shape[0], known)
        with plan_free_randomness(STEP, position), layer_scope("layer"):
            return draw(micro_shape)

    numbers = tf.range(num_microbatches, dtype=tf.int64)
    return whole.numpy(), [part(m).numpy() for m in numbers]


def position(whole_shapes, num_microbatches=2, layer="noisy"):
    drawn = {f"{layer}:{i}": WholeDraw(sizes) for i, sizes in enumerate(whole_shapes or ())}
    whole = None if whole_shapes is None else WholeDraws(drawn, lambda name, dim, folded: 1)
    return Position(tf.constant(0, tf.int64), num_microbatches, 2, whole)
