"""Pieces are cut from the whole batch and joined to it."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.table.batch import join, parts, split


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_each_replica_gets_its_neighbouring_rows(replicas, batch_dim):
    x = np.arange(12 * 12).reshape([12, 12])
    cutting = Cutting(3, 4, batch_dim, replicas)
    found = parts([tf.constant(x), None], tf.constant(1, tf.int64), cutting)
    assert found[1::2] == [None] * replicas
    wanted = np.split(np.split(x, 3, axis=batch_dim)[1], replicas, axis=batch_dim)
    for one, other in zip(found[::2], wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("batch_dim", "sequence_dim"), [(0, 1), (1, 0)])
def test_a_slice_gets_its_positions_and_what_is_no_sequence_whole(batch_dim, sequence_dim):
    x = np.arange(12 * 12 * 2).reshape([12, 12, 2])
    cutting = Cutting(3, 4, batch_dim, 2, 4, 3, sequence_dim)
    found = parts([tf.constant(x)], tf.constant(6, tf.int64), cutting)
    columns = np.split(x, 4, axis=sequence_dim)[2]
    for one, other in zip(found, np.split(columns, 6, axis=batch_dim)[2:4], strict=True):
        np.testing.assert_array_equal(one, other)
    if batch_dim == 0:
        (scales, _) = parts([tf.range(12)], tf.constant(6, tf.int64), cutting)
        np.testing.assert_array_equal(scales, [4, 5])


def test_parts_are_joined_along_the_batch_and_scalars_to_a_vector():
    parts = [tf.constant([[1, 2]]), tf.constant([[3, 4]])]
    first, second = Cutting(2, 1, 0), Cutting(2, 2, 1)
    np.testing.assert_array_equal(join(parts, first), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(join(parts, second), [[1, 2, 3, 4]])
    np.testing.assert_array_equal(join([tf.constant(1), tf.constant(2)], first), [1, 2])
    np.testing.assert_array_equal(join([tf.constant(1)], Cutting(1, 1, 0)), [1])
    assert join(parts[:1], Cutting(1, 1, 0)) is parts[0]


def test_slices_are_joined_to_sequences_replica_by_replica():
    cutting = Cutting(2, 2, 0, 2, 2, 3, 1)
    whole = np.arange(4 * 6).reshape([4, 6])
    parts = [
        tf.constant(whole[2 * m + r : 2 * m + r + 1, 3 * q : 3 * q + 3])
        for m in range(2)
        for q in range(2)
        for r in range(2)
    ]
    np.testing.assert_array_equal(join(parts, cutting), whole)
    # What every slice was given as a whole gets the sum of their gradients.
    np.testing.assert_array_equal(
        join([tf.constant([float(i)]) for i in range(8)], cutting), [2, 4, 10, 12]
    )


@pytest.mark.parametrize("slices", [1, 3])
def test_pieces_that_are_split_are_those_cut_by_number(slices):
    x = tf.reshape(tf.range(12 * 12), [12, 12])
    cutting = Cutting(3, 4, 0, 2, slices, 12 // slices, 1)
    for piece, pieces in enumerate(split(x, cutting)):
        wanted = parts([x], tf.constant(piece, tf.int64), cutting)
        for one, other in zip(pieces, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
