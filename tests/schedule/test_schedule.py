"""The table as a value, and its text."""

import dataclasses

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Action,
    Schedule,
    forward_only,
    gpipe,
    validate,
    zb_v,
)
from pipemesh.schedule.schedule import loop, vee


def test_a_schedule_is_a_value():
    one, two = zb_v(2, 4), zb_v(2, 4)
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two, gpipe(2, 4)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.num_microbatches = 3


def test_lists_become_tuples_so_that_the_value_hashes():
    rows = [[Action(0, "F", 0), Action(0, "B", 0)]]
    schedule = Schedule(rows, [0], 1)
    assert hash(schedule) == hash(gpipe(1, 1))
    assert schedule == gpipe(1, 1)


def test_a_stage_on_a_device_that_does_not_exist_is_an_error():
    with pytest.raises(ScheduleError, match="stage 1 is on device 5, but there are 2 rows"):
        dataclasses.replace(gpipe(2, 2), stage_devices=(0, 5))


def test_text_may_look_like_a_figure():
    text = """
    # forward, then backward

    0: 0F0 .   .   0B0
    1: .   1F0 1B0
    """
    assert validate(Schedule.from_text(text)) == gpipe(2, 1)
    assert Schedule.from_text("0F0 0B0") == gpipe(1, 1)


def test_a_device_may_have_nothing_to_do():
    schedule = Schedule.from_text("0: 0F0 0B0\n1:\n2: 1F0 1B0")
    assert validate(schedule).to_text() == "0: 0F0 0B0\n1:\n2: 1F0 1B0"


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


def test_forward_only_is_recognized():
    assert forward_only(2, 3).is_forward_only
    assert not gpipe(2, 3).is_forward_only


def test_small_ones_by_hand():
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
