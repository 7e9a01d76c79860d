"""Rounds are the ticks of a clock on which every action takes one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, Schedule, simulate
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.simulate import rounds


@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(1, 2))
def test_with_equal_durations_an_action_starts_in_its_round(name, num_devices, factor):
    schedule = build(name, num_devices, 2 * factor * num_devices)
    starts = simulate(schedule, Costs(1, 1, 1, 1)).starts
    walked = rounds(schedule)
    assert all(moves == sorted(moves) for moves in walked)
    found = {cell: number for number, moves in enumerate(walked) for cell in moves}
    assert len(found) == sum(map(len, walked))
    assert found == {
        (device, tick): start for device, row in enumerate(starts) for tick, start in enumerate(row)
    }


def test_rows_that_wait_for_each_other_have_no_rounds():
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match="deadlock: device 0, tick 1: 0B0 waits for 1B0"):
        rounds(schedule)
