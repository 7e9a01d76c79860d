"""Lower bounds: no schedule is shorter, on tiny problems all of them are tried."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule import Costs, lower_bound, simulate
from pipemesh.schedule.builders import build
from pipemesh.schedule.schedule import vee
from tests.schedule.brute_force import shortest, shortest_in_ticks
from tests.schedule.random_schedules import costs_for, schedules


@settings(max_examples=200)
@given(st.data(), schedules)
def test_no_schedule_is_shorter(data, schedule):
    costs = data.draw(costs_for(schedule))
    for table in (schedule, schedule.only_forward()):
        timeline = simulate(table, costs)
        assert timeline.lower_bound <= timeline.makespan
        assert timeline.above_bound >= 0


# Shortest lengths by `optimal_schedule`: of vees of devices, with the pairs that each may hold.
PROVED = {(3, 4): 5, (4, 4): 11, (4, 5): 8}


@pytest.mark.parametrize(("devices", "limit"), PROVED)
@pytest.mark.parametrize("num_microbatches", [4, 6, 8, 10])
def test_the_last_forward_bounds_vees(devices, limit, num_microbatches):
    limits = [limit] * devices
    shortest = 6 * num_microbatches + PROVED[devices, limit]
    assert lower_bound(Costs(), vee(devices), num_microbatches, limits) == shortest


TINY = [
    ((0, 1), 1, (1, 1)),
    ((0, 1), 3, (1, 1)),
    ((0, 1), 3, (2, 1)),
    ((0, 1), 3, (3, 3)),
    ((0, 1, 2), 2, (1, 2, 1)),
    ((0, 1, 1, 0), 2, (2, 2)),
    ((0, 1, 1, 0), 2, (3, 2)),
    ((0, 1, 1, 0), 2, (4, 4)),
    ((0, 1, 0, 1), 2, (2, 2)),
    ((0, 1, 0, 1), 2, (3, 3)),
    ((0, 0, 1), 2, (4, 1)),
]


@pytest.mark.parametrize(("stages", "num_microbatches", "limits"), TINY)
def test_the_shortest_of_all_is_not_shorter(stages, num_microbatches, limits):
    bound = lower_bound(Costs(), stages, num_microbatches, limits)
    assert bound <= shortest_in_ticks(stages, num_microbatches, limits)


@settings(max_examples=8, deadline=None)
@given(st.data(), st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_the_shortest_of_all_is_not_shorter_for_any_costs(data, limits):
    pair = st.tuples(st.integers(0, 6), st.integers(0, 6))
    costs = Costs(*(data.draw(pair) for _ in range(5)))
    assert lower_bound(costs, (0, 1), 2, limits) <= shortest(costs, 2, limits)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("gpipe", 27),
        ("one_f_one_b", 30),
        ("zb_h1", 27),
        ("zb_v", 25.5),
        ("v_half", 26.5),
        ("v_min", 29.5),
        ("dual_pipe_v", 25.5),
    ],
)
def test_bounds_of_known_schedules(name, bound):
    schedule = build(name, 4, 8)
    assert simulate(schedule, Costs().refined(schedule.num_stages // 4)).lower_bound == bound


def test_the_bound_is_reached_where_nothing_can_wait():
    assert lower_bound(Costs(2, 5), [0], 3) == 3 * 7
    assert lower_bound(Costs(1, transfer=2), [0, 1], 1) == 5 + 4  # The last W of device 1 hides.
    assert lower_bound(Costs(1, transfer=2), [0, 1], 1, [1, 1], forward_only=True) == 4
    assert lower_bound(Costs(0, 0), [0, 1], 4) == 0
    assert simulate(build("gpipe", 2, 2), Costs(0, 0)).above_bound == 0


def test_less_room_never_lowers_the_bound():
    bounds = [lower_bound(Costs().refined(2), vee(8), 32, [k] * 8) for k in range(16, 1, -1)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 99.5 and bounds[-1] > 2 * bounds[0]
