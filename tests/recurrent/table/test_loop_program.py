"""A table as numbers: replayed, every action finds what it needs where the numbers say."""

import pytest

from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.loop_program import (
    CLEARS,
    KEEPS,
    MAX_ARRIVAL_BUFFERS,
    NOTHING,
    TAKES,
    HomeBuffer,
    Roles,
    Slots,
    program,
)
from pipemesh.recurrent.table.machine import Channel, key_of
from pipemesh.schedule import (
    execution_order,
    forward_only,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    zb_v,
)
from pipemesh.schedule.action import KEPT, OUTPUTS, PENDING
from pipemesh.schedule.builders import BUILDERS, build


def buffers(schedule, widths=None):
    """Each value has one tensor of one dtype; or as many as it is said to have, None among them."""

    def of(key):
        buffer = HomeBuffer(schedule.stage_devices[key.stage], 0, "float32")
        return [buffer] * (widths or {}).get(key.kind, 1)

    return of


def programmed(schedule, widths=None):
    """The programs of homes, how many ticks they have, and the slots of values."""
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): FULL for action in order}
    roles = Roles(order, schedule.stage_devices, modes)
    slots = Slots(order, roles, schedule.num_microbatches, buffers(schedule, widths))
    return (*program(order, schedule.stage_devices, roles, slots), slots)


def test_what_nobody_takes_is_not_kept():
    homes, _, _ = programmed(forward_only(2, 3))
    (role,) = homes[0].roles
    assert (role.puts, role.sends) == ((), (Channel(OUTPUTS, 0),))


def replayed(schedule):
    """Performs the program, home by home within each tick, with microbatches for values."""
    homes, count, _ = programmed(schedule)
    kept, indexed, arrived, rows = {}, {}, {}, {home: [] for home in homes}
    for tick in range(count):
        sent = {}
        for home, home_program in homes.items():
            if home_program.code[tick] == NOTHING:
                continue
            role, m = home_program.roles[home_program.code[tick]], home_program.microbatch[tick]
            rows[home].append((role.stage, role.kind, m))
            accesses = home_program.accesses[home_program.code[tick]]
            for key in role.takes:
                assert kept.pop(slot_of(home_program, accesses[key], tick)) == (key, m)
            for channel in role.receives:
                if channel in home_program.indexed_arrivals:
                    assert (
                        indexed[key_of(channel)].pop(home_program.indices[key_of(channel)][tick])
                        == m
                    )
                else:
                    assert arrived[channel, home_program.arrival_reads[channel][tick]] == m
            for key in role.puts:
                slot = slot_of(home_program, accesses[key], tick)
                assert slot not in kept
                kept[slot] = key, m
            for key in role.leaves:
                index = home_program.indices[key][tick]
                assert index not in indexed.setdefault(key, {})
                indexed[key][index] = m
            sent.update(dict.fromkeys(role.sends, m))
        for home_program in homes.values():
            for channel, columns in home_program.arrival_buffers.items():
                for number, column in enumerate(columns):
                    if column[tick] == TAKES:
                        arrived[channel, number] = sent[channel]
                    elif column[tick] == CLEARS:
                        arrived[channel, number] = None
                    assert column[tick] in (TAKES, CLEARS, KEEPS)
            for channel, column in home_program.indexed_arrivals.items():
                if column[tick] != NOTHING:
                    indexed.setdefault(key_of(channel), {})[column[tick]] = sent[channel]
    assert not kept
    return rows, indexed


def slot_of(home_program, accesses, tick):
    """Returns the place of the one tensor of a value."""
    (access,) = accesses
    return access.buffer, home_program.slots[access][tick]


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "decode"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_every_action_finds_what_it_needs(name, num_devices):
    schedule = build(name, num_devices, 3 * num_devices)
    rows, indexed = replayed(schedule)
    wanted = [[(a.stage, a.kind, a.microbatch) for a in row] for row in schedule.rows]
    assert [rows[home] for home in sorted(rows)] == wanted
    # What is left is what leaves the pipeline, of each microbatch at its number.
    left = {key: values for key, values in indexed.items() if values}
    assert all(values == {m: m for m in range(3 * num_devices)} for values in left.values())
    assert {(key.kind, key.stage) for key in left} <= {
        ("outputs", schedule.num_stages - 1),
        ("grads", 0),
    }


def test_buffers_hold_what_is_in_flight_and_not_all():
    _, _, slots = programmed(one_f_one_b(4, 32))
    assert [slots.sizes[HomeBuffer(home, 0, "float32")] for home in range(4)] == [4, 3, 2, 1]
    assert slots.sizes[key_of(Channel(OUTPUTS, 3), FULL)] == 32


def test_what_a_home_keeps_for_different_stages_shares_one_list():
    """It is as long as most tensors are held at once: what one action gives up, another takes."""
    widths = {KEPT: 2, PENDING: 3}
    homes, _, slots = programmed(zb_v(2, 8), widths)
    for home_program in homes.values():
        (buffer,) = home_program.buffers
        held = most = 0
        for code in home_program.code:
            if code != NOTHING:
                role = home_program.roles[code]
                held -= sum(widths.get(key.kind, 1) for key in role.takes)
                held += sum(widths.get(key.kind, 1) for key in role.puts)
                most = max(most, held)
        assert (held, most) == (0, slots.sizes[buffer])


def test_a_table_has_as_many_ticks_as_its_longest_way():
    _, count, _ = programmed(one_f_one_b(4, 8))
    assert count == 2 * (8 + 4 - 1)


def test_what_waits_long_lies_in_a_list_and_nothing_else_does():
    homes, _, slots = programmed(looped_bfs(4, 16))
    around = Channel(OUTPUTS, 3)
    assert [*homes[0].indexed_arrivals] == [around] and around not in homes[0].arrival_buffers
    assert slots.sizes[key_of(around)] > MAX_ARRIVAL_BUFFERS
    homes, _, _ = programmed(interleaved_one_f_one_b(8, 16))
    assert not any(home.indexed_arrivals for home in homes.values())
    assert max(len(r) for home in homes.values() for r in home.arrival_buffers.values()) == 4
