"""What of the batch an action works on."""

import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.cutting import Cutting
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
