"""What devices that share cores took from each other is found in the times of their actions."""

import random

import pytest

from pipemesh.report.change.sharing import alone
from pipemesh.schedule import Costs, Timeline, gpipe, one_f_one_b, simulate, zb_h1

COSTS = Costs([1.0, 1.3], input_grad=[1.0, 1.2], weight_grad=[0.8, 1.1])


@pytest.mark.parametrize("table", [gpipe, one_f_one_b, zb_h1])
@pytest.mark.parametrize("number", [2, 8])
@pytest.mark.parametrize("load", [1.0, 1.3, 1.6, 2.0])
@pytest.mark.parametrize("forward", [1.0, 1.5])
def test_loads_and_durations_of_actions_alone_are_found(table, number, load, forward):
    schedule = table(2, number)
    loads = {"F": forward, "B": load, "I": load, "W": 1.0}
    step = simulate(schedule, COSTS, cores=2, loads=loads)
    costs, found = alone(step, 2, 1)
    wanted = COSTS.per_stage(2).durations()
    for kind in {action.kind for row in schedule.rows for action in row}:
        if number > 2:
            assert found[kind] == pytest.approx(loads[kind], abs=0.11)
            times = costs.per_stage(2).durations()[kind]
            assert times == pytest.approx(wanted[kind], rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_only_varies_is_not_explained_by_sharing(seed):
    step = simulate(one_f_one_b(2, 8), COSTS, jitter=0.1, seed=seed)
    costs, loads = alone(step, 2, 1)
    assert max(loads.values()) <= 1.3
    assert costs.per_stage(2).forward == pytest.approx(COSTS.per_stage(2).forward, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_found_although_clocks_are_a_little_off(seed):
    draw = random.Random(seed)
    step = simulate(one_f_one_b(2, 8), COSTS, cores=2, loads={"B": 1.8})
    starts, ends = (
        tuple(tuple(t + draw.uniform(0, 0.02) for t in row) for row in rows)
        for rows in (step.starts, step.ends)
    )
    _, loads = alone(Timeline(step.schedule, step.costs, starts, ends), 2, 1)
    assert loads["B"] == pytest.approx(1.8, abs=0.21) and loads["F"] < 1.2


def test_with_fewer_cores_than_devices_all_are_slow_whatever_the_load():
    step = simulate(gpipe(4, 8), Costs(1, 2), cores=2)
    costs, loads = alone(step, 2, 1)
    assert set(loads.values()) == {1} and costs.per_stage(4).forward == pytest.approx((1,) * 4)


def test_devices_with_cores_of_their_own_take_what_they_took():
    step = simulate(gpipe(2, 4), COSTS)
    assert alone(step, None, 1) == (COSTS, {"F": 1, "B": 1})
    assert alone(step, 1, 2)[1] == {"F": 1, "B": 1}


def test_of_several_steps_loads_are_surer():
    table = one_f_one_b(2, 2)
    steps = []
    for seed in range(5):
        draw = random.Random(seed)
        loads = {"B": 1.8}
        durations = Costs(
            [draw.gauss(1, 0.1), draw.gauss(1, 0.1)], [draw.gauss(2, 0.1), draw.gauss(2, 0.1)]
        )
        steps.append(simulate(table, durations, cores=2, loads=loads))
    _, found = alone(steps[0], 2, 1, steps[1:])
    assert found["B"] == pytest.approx(1.8, abs=0.21) and found["F"] == 1
