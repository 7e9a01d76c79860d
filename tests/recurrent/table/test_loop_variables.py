"""Variables of the loop, rows of tables of numbers, and values that one action changes."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.table.buffers import Buffers
from pipemesh.recurrent.table.loop_program import HomeBuffer, Roles, Slots, program
from pipemesh.recurrent.table.loop_variables import Branching, Fan, Name, Table, Variables, merged
from pipemesh.recurrent.table.values import GRADS, KEPT, OUTPUTS, Channel
from pipemesh.schedule import execution_order
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import MICROBATCHES, MODES, SCHEDULE, small_machine


def variables_of():
    order, homes = execution_order(SCHEDULE), SCHEDULE.stage_devices
    machine, state = small_machine()
    for stage in range(2):
        machine.begin(stage, state)
    roles = Roles(order, homes, MODES)

    def buffers_of(key):
        return [
            None if spec is None else HomeBuffer(homes[key.stage], place, spec.dtype)
            for spec, place in zip(machine.specs(*key), machine.places(*key), strict=True)
        ]

    slots = Slots(order, roles, MICROBATCHES, buffers_of)
    programs, _ = program(order, homes, roles, slots)
    buffers = Buffers(machine, machine.stages, slots.sizes)
    return Variables(programs, machine, machine.stages, homes, state, buffers)


def test_state_and_buffers_lie_on_their_devices():
    with tf.Graph().as_default():
        found = variables_of()
        named = {
            (name.what, *((name.key,) if isinstance(name.key, int) else name.key[:2]))
            for name in found.named
        }
        assert {("carries", 0), ("accumulators", 1), ("token", 0), ("tick", 1)} <= named
        assert {("indexed", OUTPUTS, 1), ("indexed", GRADS, 0)} <= named
        assert not any(name[:2] == ("indexed", KEPT) for name in named)
        kept = {(*name.key[:2], name.key.dtype) for name in found.named if name.what == "home"}
        assert (0, 0, tf.float32) in kept and {home for home, *_ in kept} == {0, 1}
        arrives = {name.key for name in found.named if name.what == "arrival"}
        assert arrives == {Channel(OUTPUTS, 0), Channel(GRADS, 1)}
        of_first = found.named[Name("accumulators", 0)]
        assert (of_first.devices, of_first.places) == (["CPU:1"], [0])


def test_alike_channels_between_two_homes_are_one_group(monkeypatch):
    """A home sends one thing a tick; what is not alike, or goes elsewhere, goes by itself."""
    down, other, up = Channel(OUTPUTS, 0), Channel(OUTPUTS, 2), Channel(GRADS, 1)
    homes, shape = [0, 1, 0, 1], {down: [2], other: [2], up: [2]}
    with tf.Graph().as_default():
        found = variables_of()
        machine = found._machine
        monkeypatch.setattr(
            machine, "specs", lambda kind, stage: [tf.TensorSpec(shape[Channel(kind, stage)])]
        )
        monkeypatch.setattr(machine, "places", lambda kind, stage: [0])
        monkeypatch.setattr(found, "arrival_places", lambda channel: [0])
        found._add_groups([down, other], homes)
        assert found.groups[down] == found.groups[other] == (down, other)
        found._add_groups([down, up], homes)
        assert (found.groups[down], found.groups[up]) == ((down,), (up,))
        shape[other] = [3]
        found._add_groups([down, other], homes)
        assert (found.groups[down], found.groups[other]) == ((down,), (other,))


def test_values_are_packed_as_they_were_flattened():
    with tf.Graph().as_default():
        found = variables_of()
        start = {name: variable.start for name, variable in found.named.items()}
        flat = found.flatten(start)
        assert len(flat) == len(found.shapes())
        assert found.pack(flat) == start


def test_a_tick_has_its_row():
    with tf.Graph().as_default():
        table = Table({"a": [1, 2, 3], ("b", 0): [4, 5, 6]}, ["CPU:1", "CPU:2"], np.int32)
        number = table.row([tf.constant(2), tf.constant(0)])
        assert run([number(0, "a"), number(0, ("b", 0)), number(1, "a")]) == [3, 6, 1]


def test_a_table_without_columns_has_no_row():
    with tf.Graph().as_default() as graph:
        Table({}, ["CPU:1"], np.bool_).row([tf.constant(2)])
        assert [op.type for op in graph.get_operations()] == ["Const"]


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
