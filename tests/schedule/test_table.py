"""The integers of a table, against the actions that they stand for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, Schedule, gpipe, one_f_one_b
from pipemesh.schedule.action import KINDS, needs
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.table import NOTHING, cell_error, compile_table, deadlock_error, excerpt


def action_of(code, schedule):
    unit, microbatch = divmod(code, schedule.num_microbatches)
    kind, stage = divmod(unit, schedule.num_stages)
    return Action(stage, KINDS[kind], microbatch)


@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(1, 2))
def test_every_action_has_a_code_and_waits_for_its_neighbour(name, num_devices, factor):
    schedule = build(name, num_devices, 2 * factor * num_devices)
    table = compile_table(schedule)
    assert table.num_codes == len(KINDS) * schedule.num_stages * schedule.num_microbatches
    split = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "I"}
    homes = schedule.stage_devices
    for device, row in enumerate(schedule.rows):
        assert [action_of(code, schedule) for code in table.codes[device]] == list(row)
        cells = zip(row, table.waits[device], table.remote[device], strict=True)
        for action, code, remote in cells:
            sources = [
                source
                for source in needs(action, schedule.num_stages, split)
                if source.stage != action.stage
            ]
            assert [action_of(c, schedule) for c in [code] if c != NOTHING] == sources
            assert remote == any(homes[source.stage] != device for source in sources)


def test_only_devices_that_wait_for_each_other_are_named():
    # Device 0 waits for 1, which is in no circle with it.
    schedule = Schedule.from_text(
        "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n2: 2F0 2F1 2B1 2B0\n3: 3F0 3F1 3B0 3B1"
    )
    table = compile_table(schedule)
    # Where the rows stop: 1B0 waits for 2B0, that stands behind 2F1, and this waits for 1F1.
    error = deadlock_error(schedule, table, [2, 1, 1, 1])
    first = str(error).splitlines()[0]
    assert first == (
        "deadlock: device 1, tick 1: 1B0 waits for 2B0; device 2, tick 1: 2F1 waits for 1F1"
    )
    assert "[1B0]" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Beside a relative of it, beside its neighbour in the same kind, or at the end.
        ("0: 0F0 0F1 0B0\n1: 1F0 1F1 1B1 1B0", "never does 0B1 .* near tick 1, next to 0F1"),
        ("0: 0F0 0F2 0B0 0B2", "never does 0F1; it belongs near tick 1, next to 0F2"),
        ("0: 0F0 0F3 0B3 0B0", "never does 0F1; it belongs near tick 0, next to 0F0"),
        ("0: 0F0\n1: 1F1", "never does 0F1; it belongs near tick 0, next to 0F0"),
        ("0: 0F3 0F4 0F5 0B3 0B4", "never does 0F0; it belongs near tick 5, at the end of the row"),
    ],
)
def test_a_missing_action_is_placed_where_it_would_be_looked_for(text, message):
    with pytest.raises(ScheduleError, match=message):
        compile_table(Schedule.from_text(text))


def test_an_error_about_a_cell_says_where_it_is_and_shows_it():
    error = cell_error(one_f_one_b(2, 2), 1, 2, "is late")
    assert str(error).startswith("device 1, tick 2: 1F1 is late\n")
    assert "[1F1]" in str(error)


ROW = st.lists(st.integers(0, 120).map(lambda microbatch: Action(0, "F", microbatch)), max_size=9)


@given(st.data(), st.lists(ROW, min_size=1, max_size=5))
def test_an_excerpt_marks_the_cell_and_aligns_ticks(data, rows):
    device = data.draw(st.integers(0, len(rows) - 1))
    tick = data.draw(st.integers(0, len(rows[device])))
    header, *lines = excerpt(Schedule(rows, (0,), 121), device, tick).splitlines()
    shown = range(max(0, device - 1), min(len(rows), device + 2))
    ticks = {int(match[0]): match.start() for match in re.finditer(r"\d+", header)}
    longest = max(len(rows[d]) for d in shown)
    assert list(ticks) == list(range(max(0, tick - 3), max(min(longest, tick + 4), tick + 1)))
    assert [line.split(":")[0] for line in lines] == [f"  device {d}" for d in shown]
    for d, line in zip(shown, lines, strict=True):
        cells = list(re.finditer(r"\S+", line))[2:]
        for (t, column), cell in zip(ticks.items(), cells, strict=True):
            text = str(rows[d][t]) if t < len(rows[d]) else "."
            assert cell[0] == (f"[{text}]" if (d, t) == (device, tick) else text)
            assert abs((cell.start() + cell.end() - 1) / 2 - column) <= 2


def test_one_past_the_end_of_a_row_is_a_cell_too():
    assert excerpt(gpipe(2, 1), device=0, tick=2) == (
        "  tick        0     1    2\n  device 0:  0F0   0B0  [.]\n  device 1:  1F0   1B0   ."
    )
