"""The integers of a table, against the actions that they stand for."""

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Schedule, gpipe
from pipemesh.schedule.table import compile_table, deadlock_error, excerpt


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


def test_one_past_the_end_of_a_row_is_a_cell_too():
    assert excerpt(gpipe(2, 1), device=0, tick=2) == (
        "  tick        0     1    2\n  device 0:  0F0   0B0  [.]\n  device 1:  1F0   1B0   ."
    )
