"""Pieces are cut from the whole batch and joined to it."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting, join, parts, split
from pipemesh.schedule import Action

# Four microbatches of six examples, two replicas, sequences of three slices of five positions.
SLICED = Cutting(4, 6, 0, 2, 3, 5, 1)


def test_a_batch_is_cut_into_microbatches_and_these_among_replicas():
    plain, replicated = Cutting(4, 6, 1), Cutting(4, 6, 1, 2)
    assert (plain.num_parts, plain.part_size, plain.num_pieces) == (4, 6, 4)
    assert (replicated.num_parts, replicated.part_size) == (8, 3)
    assert (plain.part, plain.parts) == ("a microbatch", "microbatches")
    assert replicated.part == "a replica's part of a microbatch"
    assert replicated.parts == "the replicas' parts of microbatches"


def test_a_piece_has_a_part_of_the_examples_and_of_the_positions():
    whole = tf.TensorSpec([24, 15, 2])
    assert SLICED.num_pieces == 12
    assert SLICED.of_part(whole) == tf.TensorSpec([3, 5, 2])
    assert SLICED.with_whole_batch(whole) == tf.TensorSpec([24, 5, 2])
    assert SLICED.with_whole_sequences(whole) == tf.TensorSpec([3, 15, 2])
    # What is no sequence every slice gets whole.
    assert SLICED.of_part(tf.TensorSpec([24])) == tf.TensorSpec([3])
    assert Cutting(4, 6, 0, 2).of_part(whole) == tf.TensorSpec([3, 15, 2])


def test_actions_are_called_as_in_the_schedule():
    assert SLICED.text(Action(1, "F", 7)) == "1F2.1"
    assert Cutting(4, 6, 0).text(Action(1, "F", 3)) == "1F3"


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
