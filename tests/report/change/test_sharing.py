"""What devices that share cores took from each other is found in the times of their actions."""

import random

import pytest

from pipemesh.report.change.sharing import alone
from pipemesh.schedule import Costs, Timeline, gpipe, one_f_one_b, simulate, simulate_sharing, zb_h1

COSTS = Costs([1.0, 1.3], input_grad=[1.0, 1.2], weight_grad=[0.8, 1.1])


@pytest.mark.parametrize("table", [gpipe, one_f_one_b, zb_h1])
@pytest.mark.parametrize("number", [2, 8])
@pytest.mark.parametrize("load", [1.0, 1.3, 1.6, 2.0])
def test_the_load_and_the_durations_of_actions_alone_are_found(table, number, load):
    schedule = table(2, number)
    step = simulate_sharing(schedule, COSTS, cores=2, loads=load)
    costs, found = alone(step, 2, 1)
    assert found == pytest.approx(load, abs=0.051)
    wanted = COSTS.per_stage(2).durations()
    for kind in {action.kind for row in schedule.rows for action in row}:
        assert costs.per_stage(2).durations()[kind] == pytest.approx(wanted[kind], rel=0.02)


@pytest.mark.parametrize("seed", range(5))
def test_what_only_varies_is_not_explained_by_sharing(seed):
    step = simulate(one_f_one_b(2, 8), COSTS, jitter=0.1, seed=seed)
    costs, load = alone(step, 2, 1)
    assert load <= 1.2
    assert costs.per_stage(2).forward == pytest.approx(COSTS.per_stage(2).forward, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_found_although_actions_vary(seed):
    draw = random.Random(seed)
    step = simulate_sharing(one_f_one_b(2, 8), COSTS, cores=2, loads=1.7)
    # A clock that is a little off.
    starts, ends = (
        tuple(tuple(t + draw.uniform(0, 0.02) for t in row) for row in rows)
        for rows in (step.starts, step.ends)
    )
    _, load = alone(Timeline(step.schedule, step.costs, starts, ends), 2, 1)
    assert load == pytest.approx(1.7, abs=0.15)


def test_with_fewer_cores_than_devices_all_are_slow_whatever_the_load():
    step = simulate_sharing(gpipe(4, 8), Costs(1, 2), cores=2)
    costs, load = alone(step, 2, 1)
    assert load == 1 and costs.per_stage(4).forward == pytest.approx((1,) * 4)


def test_devices_with_cores_of_their_own_take_what_they_took():
    step = simulate(gpipe(2, 4), COSTS)
    assert alone(step, None, 1) == (COSTS, 1.0)
    assert alone(step, 1, 2)[1] == 1.0
