"""What goes from tick to tick, and the rows of tables of numbers."""

import numpy as np
import tensorflow as tf

from pipemesh.recurrent.table.kinds import GRADS, KEPT, OUTPUTS, Channel
from pipemesh.recurrent.table.lists import Lists
from pipemesh.recurrent.table.ticks.codes import Roles
from pipemesh.recurrent.table.ticks.program import Places, Shelf, program
from pipemesh.recurrent.table.ticks.variables import Name, Table, Variables
from pipemesh.schedule import execution_order
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import MICROBATCHES, MODES, SCHEDULE, small_machine


def variables_of():
    order, homes = execution_order(SCHEDULE), SCHEDULE.stage_devices
    machine, state = small_machine()
    for stage in range(2):
        machine.begin(stage, state)
    roles = Roles(order, homes, MODES)

    def shelves(key):
        return [
            None if spec is None else Shelf(homes[key.stage], place, spec.dtype)
            for spec, place in zip(machine.specs(*key), machine.places(*key), strict=True)
        ]

    places = Places(order, roles, MICROBATCHES, shelves)
    programs, _ = program(order, homes, roles, places)
    lists = Lists(machine, machine.stages, MICROBATCHES)
    lists.sizes = places.sizes
    return Variables(programs, machine, machine.stages, homes, state, lists)


def test_state_lists_and_what_arrives_go_along_on_their_devices():
    with tf.Graph().as_default():
        found = variables_of()
        named = {
            (name.what, *((name.key,) if isinstance(name.key, int) else name.key[:2]))
            for name in found.named
        }
        assert {("carries", 0), ("accumulators", 1), ("token", 0), ("tick", 1)} <= named
        assert {("list", OUTPUTS, 1), ("list", GRADS, 0)} <= named
        assert not any(name[:2] == ("list", KEPT) for name in named)
        shelves = {(*name.key[:2], name.key.dtype) for name in found.named if name.what == "shelf"}
        assert (0, 0, tf.float32) in shelves and {home for home, *_ in shelves} == {0, 1}
        arrives = {name.key for name in found.named if name.what == "register"}
        assert arrives == {Channel(OUTPUTS, 0), Channel(GRADS, 1)}
        of_first = found.named[Name("accumulators", 0)]
        assert (of_first.devices, of_first.places) == (["CPU:1"], [0])


def test_channels_between_two_homes_that_are_alike_go_by_one_wire(monkeypatch):
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
        found._add_wires([down, other], homes)
        assert found.wires[down] == found.wires[other] == (down, other)
        found._add_wires([down, up], homes)
        assert (found.wires[down], found.wires[up]) == ((down,), (up,))
        shape[other] = [3]
        found._add_wires([down, other], homes)
        assert (found.wires[down], found.wires[other]) == ((down,), (other,))


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
