"""The exact search against all schedules of tiny problems, and against published tables."""

import importlib.util
import random
import sys
from unittest import mock

import pytest

import pipemesh.schedule.optimal as optimal
from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    Schedule,
    gpipe,
    optimal_schedule,
    simulate,
    v_half,
    v_min,
    validate,
)
from pipemesh.schedule.schedule import loop, vee
from tests.schedule.brute_force import shortest, shortest_in_ticks
from tests.schedule.test_bounds import TINY

with_solver = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None,
    reason="NO OR-TOOLS: the exact search was not run; pip install '.[optimal]'",
)


def solved(costs, stages, num_microbatches, limits):
    found = optimal_schedule(
        costs, max(stages) + 1, num_microbatches, limits, stage_devices=stages, time_limit=60
    )
    timeline = simulate(validate(found.schedule), costs)
    assert timeline.makespan == found.makespan
    pairs = zip(timeline.peak_activations, limits, strict=True)
    assert all(held <= limit for held, limit in pairs)
    # But for round-off.
    assert timeline.lower_bound <= found.makespan * (1 + 1e-12)
    assert found.is_proved
    return found.makespan


@with_solver
@pytest.mark.parametrize(("stages", "num_microbatches", "limits"), TINY[2::4])
def test_it_is_the_shortest_of_all(stages, num_microbatches, limits):
    expected = shortest_in_ticks(stages, num_microbatches, limits)
    assert solved(Costs(), stages, num_microbatches, limits) == expected


@with_solver
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 12))]
)
def test_it_is_the_shortest_of_all_for_any_costs(seed):
    """Also where a whole backward is shorter than its halves, or longer."""
    rng = random.Random(seed)
    forward, backward, input_grad, weight_grad = (
        [rng.randint(1, 9) / 2 for _ in range(2)] for _ in range(4)
    )
    costs = Costs(forward, backward, input_grad, weight_grad, transfer=rng.randint(0, 2))
    limits = (rng.randint(1, 2), rng.randint(1, 2))
    expected = shortest(costs, 2, limits)
    assert solved(costs, (0, 1), 2, limits) == pytest.approx(expected, rel=1e-9)


@with_solver
@pytest.mark.parametrize(
    ("builder", "makespan"),
    [(v_half, 26.5), (v_min, 29.5)],
)
@pytest.mark.exhaustive
def test_published_tables_that_are_optimal(builder, makespan):
    costs, limits = Costs().refined(2), simulate(builder(4, 8)).peak_activations
    assert solved(costs, vee(4), 8, [max(limits)] * 4) == makespan


@with_solver
def test_costs_that_are_not_whole():
    """Thirds have no common clock: the bound is then below by less than a millionth."""
    costs = Costs([1 / 3, 2 / 7], weight_grad=0.1, transfer=0.01)
    assert solved(costs, (0, 1), 3, (2, 1)) > 2


@with_solver
def test_both_placements_are_searched_and_the_bound_is_for_both():
    """In a process with TensorFlow, where the solver itself ends in a segmentation fault."""
    assert "tensorflow" in sys.modules
    found = optimal_schedule(Costs(), 2, 4, 4, 2)
    assert found.is_proved
    each = [solved(Costs(), stages, 4, (4, 4)) for stages in (loop(2, 2), vee(2))]
    assert found.makespan == found.lower_bound == min(each)


@with_solver
def test_without_time_there_is_still_a_schedule_and_a_bound():
    found = optimal_schedule(Costs(), 4, 8, 3, 2, stage_devices=vee(4), time_limit=0.01)
    assert found.lower_bound <= found.makespan
    assert max(simulate(validate(found.schedule)).peak_activations) <= 3


def test_without_the_solver_the_error_says_how_to_get_it():
    with mock.patch.dict("sys.modules", {"ortools.sat.python.cp_model": None}):
        with pytest.raises(
            ScheduleError, match=r"use list_schedule, or .*pip install '\.\[optimal\]'"
        ):
            optimal_schedule(Costs(), 2, 2)


def answer(start, costs, limits, seconds=30):
    ticks = costs.per_stage(start.num_stages)
    whole = type(ticks)(*(tuple(map(int, values)) for values in vars(ticks).values()))
    best, bound = optimal.solve(whole, start, tuple(limits), seconds, workers=4)
    return best and simulate(validate(best), costs), bound


@with_solver
def test_a_backward_stays_whole_where_that_is_shorter():
    timeline, bound = answer(gpipe(1, 3), Costs(2, 4, 3, 3), [3])
    assert {action.kind for action in timeline.schedule.rows[0]} == {"F", "B"}
    assert timeline.makespan == bound == 3 * (2 + 4)


@with_solver
def test_transfers_count_between_devices_only():
    assert answer(gpipe(2, 1), Costs(1, transfer=3), [1, 1])[1] == 5 + 6
    near = Schedule.from_text("0F0 1F0 1B0 0B0")
    assert answer(near, Costs(1, transfer=3), [2])[1] == 6


def ask():
    start = gpipe(2, 2)
    return optimal.solve(Costs().per_stage(2), start, (2, 2), 1, workers=1)


def test_a_process_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(optimal, "__name__", "pipemesh.no_such_module")
    with pytest.raises(ScheduleError, match=r"failed with exit code 1: .*no_such_module"):
        ask()


def test_a_process_that_does_not_end_is_one_line(monkeypatch):
    monkeypatch.setattr(optimal, "_SPARE_SECONDS", -0.99)
    with pytest.raises(ScheduleError, match=r"was to take 1 s, and has not ended after 0\.01 s"):
        ask()
