"""Placements and limits of a search."""

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs
from pipemesh.schedule.placement import loop, vee
from pipemesh.schedule.problem import limits_of, placements_of


def test_two_stages_a_device_lie_on_a_loop_or_on_a_v():
    assert placements_of(Costs(), 3, 2, None) == [loop(3, 2), vee(3)]
    assert placements_of(Costs([1] * 6), 3, None, None) == [loop(3, 2), vee(3)]
    assert placements_of(Costs(), 3, 3, None) == [loop(3, 3)]
    assert placements_of(Costs(), 3, None, None) == [loop(3)]


def test_one_device_has_one_placement():
    assert placements_of(Costs(), 1, 2, None) == [(0, 0)]


def test_a_given_placement_is_the_only_one():
    assert placements_of(Costs(), 2, 7, [0, 1, 1]) == [(0, 1, 1)]
    with pytest.raises(ScheduleError, match="every device from 0 to 1 must have a stage"):
        placements_of(Costs(), 2, None, [0, 0])


def test_a_limit_is_one_number_or_one_a_device_or_none():
    assert limits_of(3, (0, 1), 2, 8) == (3, 3)
    assert limits_of([3, 1], (0, 1), 2, 8) == (3, 1)
    assert limits_of(None, (0, 1, 1), 2, 8) == (8, 16)
    with pytest.raises(ScheduleError, match="device 1 is 1, but it has 2 stages"):
        limits_of([2, 1], (0, 1, 1), 2, 8)
