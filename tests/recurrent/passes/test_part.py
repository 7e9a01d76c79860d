"""A function on the device of its replica, and sums of gradients."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.operations import Call
from pipemesh.recurrent.passes.part import Part, accumulated
from tests.recurrent.passes.traced import run


def part(has_note):
    """Doubles what it is given second; adds 1 to a note."""
    specs = [tf.TensorSpec([2])] + [tf.TensorSpec([], tf.int64)] * has_note

    def double(x, note=None):
        return [2.0 * x] if note is None else [2.0 * x, note + 1]

    function = tf.function(double, autograph=False).get_concrete_function(*specs)
    call = Call(function, [1, 2][: len(specs)])
    return Part("CPU:2", lambda: call, has_note)


@pytest.mark.parametrize("has_note", [False, True])
def test_a_part_runs_on_its_device_and_hands_the_note_on(has_note):
    with tf.Graph().as_default():
        arguments = [tf.constant([7.0, 7.0]), tf.constant([1.0, 2.0])]
        note = tf.constant(-1, tf.int64)
        results, after = part(has_note)(arguments, note)
        assert (after is note) == (not has_note)
        assert [t.device for t in results] == ["/device:CPU:2"]
        (doubled,), number = run([results, after])
    np.testing.assert_array_equal(doubled, [2.0, 4.0])
    assert number == (0 if has_note else -1)


def test_without_a_note_none_comes_back():
    with tf.Graph().as_default():
        assert part(False)([tf.zeros([2]), tf.zeros([2])])[1] is None


SPECS = [tf.TensorSpec([3]), tf.TensorSpec([3])]
# A dense gradient of half precision, and rows 2, 0 and 2 of a sparse one.
GRADS, PASTED = ["a:0", ("b:0", "i:0")], ([1, 2, 3], [10.0, 20.0, 40.0], [2, 0, 2])


def sums(before):
    dense, rows, indices = PASTED
    pasted = iter([tf.constant(dense, tf.float16), tf.constant(rows), tf.constant(indices)])
    return accumulated(before, GRADS, SPECS, ["CPU:0", "CPU:1"], pasted)


def test_the_first_sums_are_the_gradients_themselves():
    found = sums([None, None])
    assert [t.dtype for t in found] == [tf.float32] * 2
    np.testing.assert_array_equal(found, [[1, 2, 3], [20, 0, 50]])


def test_gradients_are_added_to_sums():
    found = sums([tf.constant([0.5, 0.5, 0.5]), tf.constant([100.0, 200.0, 300.0])])
    np.testing.assert_array_equal(found, [[1.5, 2.5, 3.5], [120, 200, 350]])


def test_sums_are_no_chains_of_additions():
    """The optimizer would make one of them, across what orders actions."""
    with tf.Graph().as_default() as graph:
        sums([tf.zeros([3]), tf.zeros([3])])
        types = {op.type for op in graph.get_operations()}
    assert "AddN" in types and not types & {"Add", "AddV2"}
