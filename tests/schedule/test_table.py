"""Tables that are wrong, by device, tick and action."""

import dataclasses
import re

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Schedule, gpipe, one_f_one_b, validate
from pipemesh.schedule.table import compile_table, deadlock_error, excerpt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Beside a relative of it, beside its neighbour in the same kind, or at the end.
        ("0F0 0F1 0B0\n1F0 1F1 1B1 1B0", "device 0 never does 0B1 or its I and W (0I1, 0W1); it"),
        ("0F0 0F1 0B0\n1F0 1F1 1B1 1B0", "it belongs near tick 1, next to 0F1"),
        ("0F0 0F2 0B0 0B2", "never does 0F1; it belongs near tick 1, next to 0F2"),
        ("0F0 0F3 0B3 0B0", "never does 0F1; it belongs near tick 0, next to 0F0"),
        ("0F0\n1F1", "never does 0F1; it belongs near tick 0, next to 0F0"),
        ("0F3 0F4 0F5 0B3 0B4", "never does 0F0; it belongs near tick 5, at the end of the row"),
        ("0F0 0B0\n1F0", "device 1 never does 1B0"),
        ("0F0 0I0\n1F0 1B0", "device 0 never does 0W0; it belongs near tick 1, next to 0I0"),
        ("0F0 0W0\n1F0 1B0", "device 0 never does 0I0"),
        ("0F0 0F1 0R0 0I0 0B1", "never does 0W0"),
        ("0F0 0R0", "never does 0B0"),
        ("0F0.0 0F0.1 0B0.1", "never does 0B0.0 or its I and W (0I0.0, 0W0.0)"),
        ("0F0.0 0F1.1 0B1.1 0B0.0", "never does 0F0.1"),
        ("0F0 0F0 0B0", "device 0, tick 1: 0F0 was already done on this device at tick 0"),
        ("0F0 0R0 0R0 0B0", "tick 2: 0R0 was already done on this device at tick 1"),
        ("0F0\n1F0 1B0 0B0", "device 1, tick 2: 0B0 runs here, but stage 0 is on device 0"),
        ("0F0 0I0 0W0 0B0", "device 0, tick 1: 0I0 is part of 0B0, which this device does too"),
        ("0F0 0B0 0W0", "tick 2: 0W0 is part of 0B0, which this device does too; keep either"),
        ("0F0 0F1 0I0 0W0 0B1 0W1", "so drop this W or that B"),
        ("0F0.0 0F0.1 0F0 0B0.1 0B0.0", "tick 2: 0F0 does not fit a schedule of 2 slices"),
        ("0F0.0 0B0.0", "tick 0: 0F0.0 does not fit a schedule of whole sequences"),
        ("0B0 0F0", "device 0, tick 0: 0B0 comes before 0F0 (tick 1), whose result it needs"),
        ("0F0 0W0 0I0", "tick 1: 0W0 comes before 0I0 (tick 2)"),
        ("0F0 0B0 0R0", "tick 1: 0B0 comes before 0R0 (tick 2)"),
        ("0R0 0F0 0B0", "tick 0: 0R0 comes before 0F0 (tick 1)"),
        ("1F0 0F0 1B0 0B0", "device 0, tick 0: 1F0 comes before 0F0 (tick 1)"),
        ("0F0.0 0F0.1 0B0.0 0B0.1", "tick 2: 0B0.0 comes before 0B0.1 (tick 3)"),
        ("0F0.0 0F0.1 0I0.0 0B0.1 0W0.0", "tick 2: 0I0.0 comes before 0B0.1 (tick 3)"),
        ("0F0.1 0F0.0 0B0.1 0B0.0", "tick 0: 0F0.1 comes before 0F0.0 (tick 1)"),
    ],
)
def test_wrong_tables_are_named_by_device_tick_and_action(text, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(Schedule.from_text(text))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"num_microbatches": 1}, "device 0, tick 1: 0F1 lies outside 2 stages and 1 microbatches"),
        ({"stage_devices": (0,)}, "device 1, tick 0: 1F0 lies outside 1 stages"),
    ],
)
def test_actions_outside_the_counts_are_named(counts, message):
    with pytest.raises(ScheduleError, match=message):
        validate(dataclasses.replace(gpipe(2, 2), **counts))


def test_only_devices_that_wait_for_each_other_are_named():
    # Device 0 waits for 1, which is in no circle with it.
    schedule = Schedule.from_text(
        "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n2: 2F0 2F1 2B1 2B0\n3: 3F0 3F1 3B0 3B1"
    )
    # Where the rows stop: 1B0 waits for 2B0, that stands behind 2F1, and this waits for 1F1.
    error = str(deadlock_error(schedule, compile_table(schedule), [2, 1, 1, 1]))
    assert error.startswith(
        "deadlock: device 1, tick 1: 1B0 waits for 2B0; device 2, tick 1: 2F1 waits for 1F1\n"
    )
    assert "[1B0]" in error


def test_the_error_shows_the_rows_around_the_cell():
    text = str(one_f_one_b(4, 4)).replace("2F1 2B0 2F2 2B1", "2B1 2B0 2F2 2F1")
    with pytest.raises(ScheduleError) as info:
        validate(Schedule.from_text(text))
    assert str(info.value) == (
        "device 2, tick 1: 2B1 comes before 2F1 (tick 4), whose result it needs\n"
        "  tick        0     1     2     3     4\n"
        "  device 1:  1F0   1F1   1F2   1B0   1F3\n"
        "  device 2:  2F0  [2B1]  2B0   2F2   2F1\n"
        "  device 3:  3F0   3B0   3F1   3B1   3F2"
    )
    # One past the end of a row is a cell, too.
    assert excerpt(gpipe(2, 1), device=0, tick=2) == (
        "  tick        0     1    2\n  device 0:  0F0   0B0  [.]\n  device 1:  1F0   1B0   ."
    )
