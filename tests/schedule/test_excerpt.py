"""The part of a table around one cell."""

import re

from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule import Action, Schedule, gpipe
from pipemesh.schedule.excerpt import excerpt

ROW = st.lists(st.integers(0, 120).map(lambda microbatch: Action(0, "F", microbatch)), max_size=9)


@given(st.data(), st.lists(ROW, min_size=1, max_size=5))
def test_it_shows_the_cell_in_brackets_and_its_neighbours_below_their_ticks(data, rows):
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
