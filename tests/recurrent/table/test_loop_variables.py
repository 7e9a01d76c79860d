"""Variables of the loop, rows of tables of numbers, and values that one action changes."""

import types

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.loop_program import HomeBuffer, Roles, Slots, program
from pipemesh.recurrent.table.loop_variables import (
    Branching,
    Buffers,
    Fan,
    Name,
    Table,
    Variables,
    merged,
)
from pipemesh.recurrent.table.machine import GRADS, KEPT, OUTPUTS, PENDING, Channel, key_of
from pipemesh.schedule import execution_order
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import MICROBATCHES, MODES, SCHEDULE, small_machine

DEVICES = ("CPU:1", "CPU:2")
KEY = key_of(Channel(OUTPUTS, 0))


def buffers_of(specs, places=None, size=3, devices=DEVICES):
    """Buffers of a machine that knows these shapes alone."""
    machine = types.SimpleNamespace(
        specs=lambda *key: specs, places=lambda *key: places or [0] * len(specs)
    )
    buffers = Buffers(machine, [Stage("s", None, [], [], devices)], {KEY: size})
    buffers.reserve(KEY)
    return buffers


def number(value):
    return tf.constant(value, tf.int32)


def test_only_what_is_kept_depends_on_the_mode_of_remat():
    assert key_of(Channel(KEPT, 1), FULL) == (KEPT, 1, FULL)
    assert key_of(Channel(PENDING, 1), NONE) == (PENDING, 1, NONE)
    assert key_of(Channel(OUTPUTS, 1), FULL) == key_of(Channel(OUTPUTS, 1), NONE)
    assert key_of(Channel(GRADS, 1)) != key_of(Channel(GRADS, 2))


def test_what_was_put_is_taken_by_its_number_and_is_gone_then():
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec([2]), None, tf.TensorSpec([], tf.int32)])
        for m in (2, 0):
            buffers.put(KEY, number(m), [tf.fill([2], float(m)), None, tf.constant(10 * m)])
        taken = buffers.take(KEY, number(2))
        assert taken[1] is None and buffers.handles[KEY][1] is None
        assert [t.shape for t in (taken[0], taken[2])] == [[2], []]
        later = buffers.take(KEY, number(0))
        left = tf.raw_ops.TensorListGetItem(
            input_handle=buffers.handles[KEY][0],
            index=tf.constant(2),
            element_shape=tf.constant(-1),
            element_dtype=tf.float32,
        )
        found = run([taken[0], taken[2], later[0], later[2], left])
    np.testing.assert_array_equal(found[0], [2, 2])
    np.testing.assert_array_equal(found[2], [0, 0])
    assert (found[1], found[3]) == (20, 0)
    assert found[4].size == 0


def test_buffers_lie_where_their_replicas_do_and_are_made_once():
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec([2])] * 3, [1, 0, 1])
        made = buffers.handles[KEY]
        assert [t.device for t in made] == [f"/device:{DEVICES[i]}" for i in (1, 0, 1)]
        buffers.reserve(KEY)
        assert all(one is other for one, other in zip(buffers.handles[KEY], made, strict=True))


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_joined_they_are_the_whole_batch(batch_dim, replicas):
    shape = [2, 4]
    parts = np.arange(3 * replicas * 8, dtype=np.float32).reshape([3, replicas, *shape])
    with tf.Graph().as_default():
        specs = [tf.TensorSpec(shape)] * replicas
        buffers = buffers_of(specs, [*range(replicas)], devices=DEVICES[:replicas])
        for m in (1, 0, 2):
            buffers.put(KEY, number(m), [tf.constant(part) for part in parts[m]])
        (joined,) = buffers.joined(KEY, Cutting(3, 2 * replicas, batch_dim, replicas))
        found = run(joined)
    np.testing.assert_array_equal(found, np.concatenate([*parts.reshape([-1, *shape])], batch_dim))


def test_joined_scalars_are_a_vector_and_what_does_not_exist_is_none():
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec([]), None], devices="CPU:1")
        for m in range(3):
            buffers.put(KEY, number(m), [tf.constant(float(m)), None])
        losses, none = buffers.joined(KEY, Cutting(3, 2, 0))
        assert none is None and losses.shape == [3]
        np.testing.assert_array_equal(run(losses), [0, 1, 2])


@pytest.mark.parametrize("sequence_dim", [0, 1, 2])
def test_joined_slices_are_whole_sequences_or_a_sum(sequence_dim):
    """Three dims: the batch is one of the first two; a dim that is not there adds slices up."""
    batch_dim = 1 if sequence_dim == 0 else 0
    shape = [3, 4] if sequence_dim == 2 else [3, 4, 2]
    cutting = Cutting(2, shape[batch_dim], batch_dim, 1, 3, shape[0], sequence_dim)
    parts = np.random.default_rng(0).normal(size=[2, 3, *shape]).astype(np.float32)
    with tf.Graph().as_default():
        buffers = buffers_of([tf.TensorSpec(shape)], size=6, devices="CPU:0")
        for piece in range(6):
            buffers.put(KEY, number(piece), [tf.constant(parts[divmod(piece, 3)])])
        found = run(buffers.joined(KEY, cutting)[0])
    if sequence_dim == 2:
        rows = parts.sum(1)
    else:
        rows = [np.concatenate([*row], sequence_dim) for row in parts]
    np.testing.assert_allclose(found, np.concatenate([*rows], batch_dim), rtol=1e-5)


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
