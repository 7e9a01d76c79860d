"""Values that one action of several makes, or none of them."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.table.ticks.branches import Branching, Fan, merged
from tests.recurrent.passes.traced import run


@pytest.mark.parametrize(("code", "wanted"), [(0, [4.0, 2.0]), (1, [3.0, 6.0]), (2, [3.0, 2.0])])
def test_that_action_which_is_due_changes_the_values_and_no_other(code, wanted):
    with tf.Graph().as_default():
        branching = Branching(
            [tf.constant(3.0), None, tf.constant(2.0)], ["CPU:1", "CPU:1", "CPU:2"], [0, 0, 1]
        )
        first = branching.enter(lambda place: tf.equal(code, 0))
        branching.leave([first[0] + 1, None, first[2]])
        second = branching.enter(lambda place: tf.equal(code, 1))
        branching.leave([second[0], None, 3 * second[2]])
        found = branching.merged()
        assert found[1] is None
        np.testing.assert_array_equal(run([found[0], found[2]]), wanted)


def test_values_of_actions_that_are_not_due_are_not_there():
    with tf.Graph().as_default():
        branching = Branching([tf.constant(3.0)], ["CPU:1"], [0])
        (value,) = branching.enter(lambda place: tf.constant(False))
        with pytest.raises(tf.errors.InvalidArgumentError, match="Retval"):
            run(value + 1)


def test_predicates_are_asked_for_on_the_device_of_each_value():
    asked = []

    def is_due(place):
        asked.append(place)
        return tf.constant(True)

    with tf.Graph().as_default():
        values = [tf.constant(1.0), tf.constant(2.0)]
        branching = Branching(values, ["CPU:1", "CPU:2"], [0, 1])
        taken = branching.enter(is_due)
        assert [t.device[-5:] for t in taken] == ["CPU:1", "CPU:2"]
    assert asked == [0, 1]


def test_values_of_any_shape_are_merged_and_one_list_is_left_as_it_is():
    with tf.Graph().as_default():
        value = tf.constant([1.0])
        assert merged([[value, None]], ["CPU:1", "CPU:1"]) == [value, None]
        pair = tf.raw_ops.Switch(data=value, pred=tf.constant(True))
        other = tf.raw_ops.Switch(data=tf.constant(7.0), pred=tf.constant(True))
        lists = [[pair.output_false, None], [other.output_true, None]]
        (found, none) = merged(lists, ["CPU:1", "CPU:1"])
        assert none is None and run(found) == 7.0


@pytest.mark.parametrize(("number", "wanted"), [(0, 4.0), (1, 9.0), (2, 3.0), (3, 3.0)])
def test_values_go_to_that_user_whose_number_the_step_says(number, wanted):
    """User 2 does nothing with it; 3 is nobody."""
    with tf.Graph().as_default() as graph:
        fan = Fan([tf.constant(3.0), None], ["CPU:1"] * 2, [0, 0], lambda _: tf.constant(number), 3)
        (first, none), (second, _) = fan.to(0), fan.to(1)
        assert none is None
        fan.leave(0, [first + 1, None])
        fan.leave(1, [3 * second, None])
        (found, _) = fan.merged()
        assert run(found) == wanted
        assert [op.type for op in graph.get_operations()].count("_SwitchN") == 1
        with pytest.raises(tf.errors.InvalidArgumentError, match="Retval"):
            run([fan.to(user)[0] for user in range(4) if user != number])
