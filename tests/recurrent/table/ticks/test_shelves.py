"""What actions put on shelves others take, and a shelf no longer holds it then."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.table.ticks.program import Access, Shelf
from pipemesh.recurrent.table.ticks.shelves import Shelves
from tests.recurrent.passes.traced import run

FLOATS, WHOLE = Shelf(0, 0, tf.float32), Shelf(0, 1, tf.int32)
# Three tensors, of which one is not there, on two devices.
ACCESSES = [Access(FLOATS, 0), None, Access(WHOLE, 0), Access(FLOATS, 1)]
SPECS = [
    tf.TensorSpec([2], tf.float32),
    None,
    tf.TensorSpec([], tf.int32),
    tf.TensorSpec([1], tf.float32),
]
SLOTS = {ACCESSES[0]: 2, ACCESSES[2]: 0, ACCESSES[3]: 1}


def reserved(dtype):
    return tf.raw_ops.TensorListReserve(element_shape=-1, num_elements=3, element_dtype=dtype)


def shelves_of(handles, code):
    def numbers(place, name):
        return tf.constant(code if name == "code" else SLOTS[name])

    return Shelves(handles, ["CPU:1", "CPU:2"], numbers, num_roles=2)


def put_and_taken(codes):
    """One tick after another, in each of which role 0 puts the values and role 1 takes them."""
    handles = {FLOATS: [reserved(tf.float32)], WHOLE: [reserved(tf.int32)]}
    taken = []
    for code in codes:
        shelves = shelves_of(handles, code)
        values = [tf.constant([1.0, 2.0]), None, tf.constant(7), tf.constant([3.0])]
        shelves.put(0, ACCESSES, values)
        taken.append(shelves.take(1, ACCESSES, SPECS))
        handles = shelves.merged()
    return handles, taken


def test_what_one_action_puts_another_takes_tick_by_tick():
    with tf.Graph().as_default():
        _, (_, _, taken) = put_and_taken([0, 2, 1])
        assert taken[1] is None
        assert [t.device[-5:] for t in taken if t is not None] == ["CPU:1", "CPU:2", "CPU:1"]
        first, number, last = run([t for t in taken if t is not None])
        np.testing.assert_array_equal(first, [1.0, 2.0])
        assert (number, last) == (7, [3.0])


def test_what_is_taken_is_no_longer_held():
    with tf.Graph().as_default():
        handles, _ = put_and_taken([0, 1])
        left = [
            tf.raw_ops.TensorListGetItem(
                input_handle=handles[FLOATS][0],
                index=slot,
                element_shape=-1,
                element_dtype=tf.float32,
            )
            for slot in (1, 2)
        ]
        assert [t.shape for t in run(left)] == [(0,), (0,)]


def test_what_is_not_due_is_neither_put_nor_taken():
    with tf.Graph().as_default():
        _, (taken,) = put_and_taken([0])
        with pytest.raises(tf.errors.InvalidArgumentError, match="Retval"):
            run(taken[0])


def test_actions_share_constants():
    """Each of them would be an operation a tick."""
    with tf.Graph().as_default() as graph:
        shelves = shelves_of({FLOATS: [reserved(tf.float32)]}, 1)
        before = [op.type for op in graph.get_operations()].count("Const")
        mine = [Access(FLOATS, 0), Access(FLOATS, 1)]
        for role in (0, 1):
            shelves.take(role, mine, [tf.TensorSpec([2]), tf.TensorSpec([2])])
        consts = [op.type for op in graph.get_operations()].count("Const") - before
        # Eight slots, which are constants in this test, an empty value and a shape.
        assert consts == 8 + 2
