"""Pieces are cut from the whole batch and joined to it."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting, join, join_stacked, parts, split

# Four microbatches of six examples, two replicas, sequences of three slices of five positions.
SLICED = Cutting(4, 6, 0, 2, 3, 5, 1)


def test_traced_with_the_whole_batch_a_carry_has_all_its_rows():
    def carries(cutting, *shapes):
        carry = [tf.TensorSpec(shape) for shape in shapes]
        stage = Stage("s", lambda *_: ([], []), [], carry, "CPU:0", recurrent=True)
        return [[t.shape.as_list() for t in s.carry] for s in cutting.for_whole_batch(stage)]

    assert carries(SLICED, [3, 15], []) == [[[24, 15], []]]
    # Of time first in the inputs and of a state as wide as a microbatch has rows.
    time_first = Cutting(4, 6, 1, 2, 3, 5, 0)
    assert carries(time_first, [3, 4]) == [[[24, 4]]]
    assert carries(time_first, [3, 3]) == [[[3, 24]], [[24, 3]]]
    assert carries(Cutting(4, 6, 0), [6, 2]) == [[[6, 2]]]


def test_gradients_of_what_every_slice_got_are_summed():
    cutting = Cutting(2, 2, 0, 2, 2, 3, 1)
    parts = [tf.constant([float(i)]) for i in range(8)]
    np.testing.assert_array_equal(join(parts, cutting), [2, 4, 10, 12])
    by_replica = [tf.stack(parts[0::2]), tf.stack(parts[1::2])]
    np.testing.assert_array_equal(join_stacked(by_replica, cutting), [2, 4, 10, 12])


@pytest.mark.parametrize(("slices", "batch_dim"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_pieces_that_are_split_are_those_cut_by_number(slices, batch_dim):
    x = tf.reshape(tf.range(12 * 12 * 2), [12, 12, 2])
    cutting = Cutting(3, 4, batch_dim, 2, slices, 12 // slices, 1 - batch_dim)
    pieces = split(x, cutting)
    for piece, own in enumerate(pieces):
        wanted = parts([x], tf.constant(piece, tf.int64), cutting)
        for one, other in zip(own, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(join([part for own in pieces for part in own], cutting), x)
    by_replica = [tf.stack(own) for own in zip(*pieces, strict=True)]
    np.testing.assert_array_equal(join_stacked(by_replica, cutting), x)
