"""A block of a random draw is what the whole draw has there."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.randomness.philox import draw_block

SEED = tf.constant([5, 6], tf.int64)
UNIFORM, NORMAL = tf.raw_ops.StatelessRandomUniformV2, tf.raw_ops.StatelessRandomNormalV2


def block_of(raw, sizes, begin, block, dtype=tf.float32):
    return draw_block(raw, sizes, [tf.constant(at) for at in begin], block, SEED, dtype).numpy()


@pytest.mark.parametrize("raw", [UNIFORM, NORMAL])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize(
    ("begin", "block"),
    [
        ((0, 0, 0), (6, 5, 7)),
        ((2, 0, 0), (3, 5, 7)),
        ((1, 0, 0), (1, 5, 7)),
        ((1, 2, 0), (1, 3, 7)),
        ((1, 2, 3), (1, 1, 3)),
        ((5, 4, 6), (1, 1, 1)),
        ((1, 2, 3), (2, 2, 2)),
        ((0, 2, 0), (6, 2, 7)),
        ((0, 0, 0), (6, 0, 7)),
    ],
)
def test_a_block_is_a_part_of_the_whole(raw, dtype, begin, block):
    sizes = (6, 5, 7)
    whole = block_of(raw, sizes, (0, 0, 0), sizes, dtype)
    part = tuple(slice(at, at + size) for at, size in zip(begin, block, strict=True))
    found = block_of(raw, sizes, begin, block, dtype)
    assert found.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(found, whole[part])


def test_the_whole_is_what_tensorflow_draws():
    want = tf.random.stateless_normal([3, 5], SEED, alg="philox")
    np.testing.assert_array_equal(block_of(NORMAL, (3, 5), (0, 0), (3, 5)), want)


def test_of_leading_dims_no_other_numbers_are_drawn():
    drawn = []

    def raw(shape, **kwargs):
        drawn.append(int(tf.reduce_prod(shape)))
        return UNIFORM(shape=shape, **kwargs)

    block_of(raw, (1000, 10), (500, 0), (2, 10))
    assert len(drawn) == 1 and drawn[0] < 30


@pytest.mark.parametrize("begin", [500, tf.constant(500)])
def test_what_begins_with_a_group_is_drawn_by_itself(begin):
    drawn = []

    def raw(shape, **kwargs):
        drawn.append(tuple(shape.numpy()))
        return UNIFORM(shape=shape, **kwargs)

    found = draw_block(raw, (1000, 12), [begin, 0], (2, 12), SEED, tf.float32)
    assert drawn == [(2, 12)]
    np.testing.assert_array_equal(found, block_of(UNIFORM, (1000, 12), (0, 0), (1000, 12))[500:502])


@pytest.mark.parametrize("sizes", [(6, 5, 7), (6, 4, 8)])
def test_where_a_block_begins_may_be_known_only_when_it_is_drawn(sizes):
    run = tf.function(
        lambda at: draw_block(UNIFORM, sizes, [at, 1, 0], (1, 2, sizes[2]), SEED, tf.float32)
    )
    whole = block_of(UNIFORM, sizes, (0, 0, 0), sizes)
    for at in range(sizes[0]):
        np.testing.assert_array_equal(run(tf.constant(at)), whole[at : at + 1, 1:3])
