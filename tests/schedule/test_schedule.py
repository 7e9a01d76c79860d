"""The table as a value, and its text."""

import pytest
from hypothesis import given

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, Schedule, gpipe, recompute, seq_one_f_one_b, validate
from tests.schedule.random_schedules import schedules


@given(schedules)
def test_text_gives_it_back(schedule):
    assert Schedule.from_text(str(schedule)) == schedule


def test_lists_become_tuples_so_that_the_value_hashes():
    schedule = Schedule([[Action(0, "F", 0), Action(0, "B", 0)]], [0], 1)
    assert hash(schedule) == hash(gpipe(1, 1)) and schedule == gpipe(1, 1)


def test_text_may_look_like_a_figure():
    text = """
    # forward, then backward

    0: 0F0 .   .   0B0
    1: .   1F0 1B0
    """
    assert validate(Schedule.from_text(text)) == gpipe(2, 1)
    assert Schedule.from_text("0F0 0B0") == gpipe(1, 1)
    idle = "0: 0F0 0B0\n1:\n2: 1F0 1B0"
    assert validate(Schedule.from_text(idle)).to_text() == idle


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0 0X0", "line 1, column 9: '0X0' is not an action"),
        ("0: 0F0\n1: 1F0 1F", "line 2, column 10: '1F' is not an action"),
        ("# note\n\n0F0 0B0 oops", "line 3, column 9: 'oops' is not an action"),
        ("1: 0F0", "line 1, column 1: the row is labelled 1, but it is the row of device 0"),
        ("0: 0F0 2F0", "stage 2 is mentioned but stage 1 is not"),
        ("999999999F0", "stage 999999999 is mentioned but stage 0 is not"),
        ("", "holds no action"),
        ("0:\n1:", "holds no action"),
    ],
)
def test_malformed_text_names_line_and_column(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


def test_by_pieces_slices_are_microbatches():
    schedule = seq_one_f_one_b(2, 2, 3)
    pieces = schedule.by_pieces()
    assert (pieces.num_microbatches, pieces.num_slices) == (6, 1)
    assert str(pieces).splitlines()[1] == "1: 1F0 1F1 1F2 1B2 1F3 1B1 1F4 1B0 1F5 1B5 1B4 1B3"
    assert pieces.recomputed() == frozenset()
    assert recompute(schedule).by_pieces().recomputed() == recompute(schedule).recomputed()
    assert gpipe(2, 3).by_pieces() == gpipe(2, 3)
