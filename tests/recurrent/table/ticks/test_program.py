"""A table as numbers: replayed, every action finds what it needs where the numbers say."""

import pytest

from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.kinds import KEPT, OUTPUTS, Channel
from pipemesh.recurrent.table.lists import Lists
from pipemesh.recurrent.table.ticks.codes import Roles, key_of
from pipemesh.recurrent.table.ticks.program import (
    CLEARS,
    KEEPS,
    MAX_REGISTERS,
    NOTHING,
    TAKES,
    Places,
    program,
    ticks_of,
)
from pipemesh.schedule import execution_order, interleaved_one_f_one_b, looped_bfs, one_f_one_b
from pipemesh.schedule.builders import BUILDERS, build


def programmed(schedule):
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): FULL for action in order}
    roles = Roles(order, schedule.stage_devices, modes)
    places = Places(order, roles, schedule.num_microbatches)
    return (*program(order, schedule.stage_devices, roles, places), places)


def replayed(schedule):
    """Performs the program, home by home within each tick, with microbatches for values."""
    homes, count, _ = programmed(schedule)
    lists, registers, rows = {}, {}, {home: [] for home in homes}
    for tick in range(count):
        told = {}
        for home, own in homes.items():
            if own.code[tick] == NOTHING:
                continue
            role, m = own.roles[own.code[tick]], own.microbatch[tick]
            rows[home].append((role.code.stage, role.code.kind, m))
            for key in role.takes:
                assert lists[key].pop(own.indices[key][tick]) == m
            for channel in role.hears:
                if channel in own.arrivals:
                    assert lists[key_of(channel)].pop(own.indices[key_of(channel)][tick]) == m
                else:
                    assert registers[channel, own.reads[channel][tick]] == m
            for key in role.puts:
                index = own.indices[key][tick]
                assert index not in lists.setdefault(key, {})
                lists[key][index] = m
            told.update(dict.fromkeys(role.tells, m))
        for own in homes.values():
            for channel, columns in own.registers.items():
                for number, column in enumerate(columns):
                    if column[tick] == TAKES:
                        registers[channel, number] = told[channel]
                    elif column[tick] == CLEARS:
                        registers[channel, number] = None
                    assert column[tick] in (TAKES, CLEARS, KEEPS)
            for channel, column in own.arrivals.items():
                if column[tick] != NOTHING:
                    lists.setdefault(key_of(channel), {})[column[tick]] = told[channel]
    return rows, lists


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "decode"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_every_action_finds_what_it_needs(name, num_devices):
    schedule = build(name, num_devices, 3 * num_devices)
    rows, lists = replayed(schedule)
    wanted = [[(a.stage, a.kind, a.microbatch) for a in row] for row in schedule.rows]
    assert [rows[home] for home in sorted(rows)] == wanted
    # What is left is what leaves the pipeline, of each microbatch at its number.
    left = {key: values for key, values in lists.items() if values}
    assert all(values == {m: m for m in range(3 * num_devices)} for values in left.values())
    assert {(key.kind.name, key.stage) for key in left} <= {
        ("outputs", schedule.num_stages - 1),
        ("grads", 0),
    }


def test_lists_hold_what_is_in_flight_and_not_all():
    _, _, places = programmed(one_f_one_b(4, 32))
    assert [places.sizes[Lists.key(KEPT, stage, FULL)] for stage in range(4)] == [4, 3, 2, 1]
    assert places.sizes[Lists.key(OUTPUTS, 3, FULL)] == 32


def test_a_table_has_as_many_ticks_as_its_longest_way():
    schedule = one_f_one_b(4, 8)
    order = execution_order(schedule)
    roles = Roles(order, schedule.stage_devices, {(a.stage, a.microbatch): FULL for a in order})
    assert max(ticks_of(order, roles, schedule.stage_devices)) + 1 == 2 * (8 + 4 - 1)


def test_what_waits_long_lies_in_a_list_and_nothing_else_does():
    homes, _, places = programmed(looped_bfs(4, 16))
    around = Channel(OUTPUTS, 3)
    assert [*homes[0].arrivals] == [around] and around not in homes[0].registers
    assert places.sizes[key_of(around)] > MAX_REGISTERS
    homes, _, _ = programmed(interleaved_one_f_one_b(8, 16))
    assert not any(home.arrivals for home in homes.values())
    assert max(len(r) for home in homes.values() for r in home.registers.values()) == 4
