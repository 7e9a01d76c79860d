"""A table as numbers: replayed, every action finds what it needs where the numbers say."""

import pytest

from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.kinds import KEPT, OUTPUTS, PENDING, Channel
from pipemesh.recurrent.table.lists import Lists
from pipemesh.recurrent.table.ticks.codes import Roles, key_of
from pipemesh.recurrent.table.ticks.program import (
    CLEARS,
    KEEPS,
    MAX_REGISTERS,
    NOTHING,
    TAKES,
    Places,
    Shelf,
    program,
    ticks_of,
)
from pipemesh.schedule import (
    execution_order,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build


def shelves(schedule, widths=None):
    """Each value has one tensor of one dtype; or as many as it is said to have, None among them."""

    def of(key):
        shelf = Shelf(schedule.stage_devices[key.stage], 0, "float32")
        return [shelf] * (widths or {}).get(key.kind, 1)

    return of


def programmed(schedule, widths=None):
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): FULL for action in order}
    roles = Roles(order, schedule.stage_devices, modes)
    places = Places(order, roles, schedule.num_microbatches, shelves(schedule, widths))
    return (*program(order, schedule.stage_devices, roles, places), places)


def replayed(schedule):
    """Performs the program, home by home within each tick, with microbatches for values."""
    homes, count, _ = programmed(schedule)
    shelved, lists, registers, rows = {}, {}, {}, {home: [] for home in homes}
    for tick in range(count):
        told = {}
        for home, own in homes.items():
            if own.code[tick] == NOTHING:
                continue
            role, m = own.roles[own.code[tick]], own.microbatch[tick]
            rows[home].append((role.code.stage, role.code.kind, m))
            accesses = own.accesses[own.code[tick]]
            for key in role.takes:
                assert shelved.pop(slot_of(own, accesses[key], tick)) == (key, m)
            for channel in role.hears:
                if channel in own.arrivals:
                    assert lists[key_of(channel)].pop(own.indices[key_of(channel)][tick]) == m
                else:
                    assert registers[channel, own.reads[channel][tick]] == m
            for key in role.puts:
                if key in accesses:
                    slot = slot_of(own, accesses[key], tick)
                    assert slot not in shelved
                    shelved[slot] = key, m
                    continue
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
    assert not shelved
    return rows, lists


def slot_of(own, accesses, tick):
    """Where the one tensor of a value lies."""
    (access,) = accesses
    return access.shelf, own.slots[access.shelf][access.number][tick]


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


def test_shelves_hold_what_is_in_flight_and_not_all():
    _, _, places = programmed(one_f_one_b(4, 32))
    assert [places.sizes[Shelf(home, 0, "float32")] for home in range(4)] == [4, 3, 2, 1]
    assert places.sizes[Lists.key(OUTPUTS, 3, FULL)] == 32


def test_what_a_home_keeps_for_different_stages_shares_one_list():
    """It is as long as most tensors are held at once: what one action gives up, another takes."""
    widths = {KEPT: 2, PENDING: 3}
    homes, _, places = programmed(zb_v(2, 8), widths)
    for own in homes.values():
        (shelf,) = own.slots
        held = most = 0
        for code in own.code:
            if code != NOTHING:
                role = own.roles[code]
                held -= sum(widths.get(key.kind, 1) for key in role.takes)
                held += sum(widths.get(key.kind, 1) for key in role.puts if places.is_shelved(key))
                most = max(most, held)
        assert (held, most) == (0, places.sizes[shelf])


def test_an_action_that_takes_two_values_finds_them_at_different_places():
    homes, _, _ = programmed(zb_v(2, 8), {KEPT: 2})
    own = homes[0]
    for number, role in enumerate(own.roles):
        accesses = [a for found in own.accesses[number].values() for a in found]
        assert [access.number for access in accesses] == [*range(len(accesses))]
        for tick, code in enumerate(own.code):
            if code == number and role.code.kind == "F":
                slots = [own.slots[a.shelf][a.number][tick] for a in accesses]
                assert len({*slots}) == len(slots)


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
