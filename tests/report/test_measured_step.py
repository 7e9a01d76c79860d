"""The parts of a measured step add up, and each is the thing that it is named after."""

import random

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.plan.stages import action_costs, stages_of
from pipemesh.report.measured_step import alone, corrected, parts_of, waits_of
from pipemesh.schedule import Costs, Timeline, gpipe, one_f_one_b, simulate, zb_h1, zb_v

NAMES = ["work", "filling and draining", "imbalance", "variation", "overhead", "transfers"]


def times(measured):
    found = parts_of(measured)
    assert [part.name for part in found if part.name != "overlap"] == NAMES
    assert sum(part.time for part in found) == pytest.approx(measured.makespan)
    return {part.name: part.time for part in found}


def measured(real, costs=None):
    """Returns a step that ran as `real`, with the median durations `costs`."""
    return Timeline(real.schedule, costs or real.costs, real.starts, real.ends)


def paused(real, seconds):
    """A step of one device that pauses before each action but the first."""
    starts, ends = (
        (tuple(time + seconds * n for n, time in enumerate(row)),)
        for (row,) in (real.starts, real.ends)
    )
    return Timeline(real.schedule, real.costs, starts, ends)


def test_step_as_simulated_has_no_other_parts():
    found = times(simulate(gpipe(4, 8), Costs(1, 2)))
    assert found["work"] == 24 and found["filling and draining"] == 9
    assert [found[name] for name in NAMES[2:]] == [0] * 4
    found = times(simulate(one_f_one_b(2, 4), Costs([1, 3], [2, 6])))
    assert found["work"] == 24 and found["imbalance"] > 0
    assert [found[name] for name in NAMES[3:]] == [0] * 3


def test_transfers_pauses_and_slow_actions_are_told_apart():
    found = times(measured(simulate(gpipe(2, 3), Costs(1, 2, transfer=0.25)), Costs(1, 2)))
    assert found["transfers"] == pytest.approx(0.5)
    assert [found[name] for name in NAMES[2:5]] == [0] * 3
    found = times(paused(simulate(gpipe(1, 2), Costs(1, 2)), 0.5))
    assert found["overhead"] == pytest.approx(1.5) and found["transfers"] == 0
    real = simulate(gpipe(1, 4), Costs(1, 2))

    def late(row, n):
        return tuple(time + (3 if tick >= n else 0) for tick, time in enumerate(row))

    starts, ends = ((late(rows[0], n),) for rows, n in ((real.starts, 3), (real.ends, 2)))
    found = times(Timeline(real.schedule, real.costs, starts, ends))
    assert found["variation"] == pytest.approx(3)
    assert found["overhead"] == found["transfers"] == pytest.approx(0)


def test_early_start_is_overlap_and_no_wait():
    """The second stage begins with first results, 0.5 before the first stage's actions end."""
    real = simulate(gpipe(2, 2), Costs(1, 2))
    early = tuple(time - 0.5 for time in real.starts[1]), tuple(time - 0.5 for time in real.ends[1])
    starts, ends = (
        (rows[0], row) for rows, row in zip((real.starts, real.ends), early, strict=True)
    )
    found = times(Timeline(real.schedule, real.costs, starts, ends))
    assert found["overhead"] >= 0 and found["transfers"] >= 0 > found["overlap"]
    real = simulate(gpipe(2, 1), Costs(1, 2))
    early = real.starts[0], (real.starts[1][0] - 0.5, *real.starts[1][1:])
    found = waits_of(Timeline(real.schedule, real.costs, early, real.ends))
    assert (found.own, found.sent) == (0, 0)


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 5), one_f_one_b(4, 8), zb_v(4, 8)], ids=["gpipe", "1f1b", "zb_v"]
)
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_any_step_add_up(schedule, seed):
    draw = random.Random(seed)
    usual = [draw.uniform(1, 2) for _ in range(schedule.num_stages)]
    costs = Costs(usual, input_grad=usual, weight_grad=usual)
    late = Costs(usual, input_grad=usual, weight_grad=usual, transfer=draw.uniform(0, 0.5))
    found = times(measured(simulate(schedule, late, jitter=0.3, seed=seed), costs))
    assert found["work"] > 0 and found["transfers"] > 0


def test_waits_are_own_or_for_transfers():
    found = waits_of(simulate(one_f_one_b(2, 4), Costs(1, 2, transfer=0.25)))
    assert (found.own, found.sent) == (0, pytest.approx(0.25))
    found = waits_of(paused(simulate(gpipe(1, 2), Costs(1, 2)), 0.5))
    assert (found.own, found.sent) == (pytest.approx(0.5 * 3 / 4), 0)


BATCH = 16


def flops(**more):
    """Layers whose seconds are flops, as a record has them."""
    costs = [LayerCost(1e9 * n, parameter_bytes=8, boundary_bytes=1) for n in range(1, 7)]
    return Figures(tuple(figures_of_costs(costs, 4)), **more)


def step_of(plan, figures):
    """The step that figures make of a plan, without the time outside of its pipeline."""
    stages = stages_of(plan, figures, BATCH)
    return seen(simulate(stages.run, action_costs(stages, figures), cores=figures.cores), plan)


def seen(timeline, plan):
    """As a clock sees it: what is computed again is in no action."""
    starts, ends = (
        tuple(
            tuple(time for time, action in zip(row, actions, strict=True) if action.kind != "R")
            for row, actions in zip(times, timeline.schedule.rows, strict=True)
        )
        for times in (timeline.starts, timeline.ends)
    )
    return Timeline(plan.table, timeline.costs, starts, ends)


def truth(seed=0, cores=None):
    """Layers of which only a machine knows what they take."""
    draw = random.Random(seed)
    held = {"parameter_bytes": 8.0, "activation_bytes": 4.0, "boundary_bytes": 1.0}
    costs = []
    for _ in range(6):
        forward = draw.uniform(0.01, 0.02)
        costs.append(LayerCost(forward, backward=draw.uniform(1.5, 2.5) * forward, **held))
    link = Link(2e-3, 1e9)
    return Figures(tuple(figures_of_costs(costs, 4)), fixed=0.05, transfer=link, cores=cores)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("base", ["flops", "figures"])
def test_timed_step_is_reproduced(schedule, remat, base):
    cuts = (0, 2, 6)
    plan = Plan("layers:2", schedule=schedule, num_microbatches=4, boundaries=cuts, remat=remat)
    real = truth()
    timeline = step_of(plan, real)
    given = flops() if base == "flops" else truth(seed=5)
    found = corrected(given, plan, BATCH, timeline, timeline.makespan + 0.05)
    again = predict(plan, found, BATCH)
    assert again.seconds == pytest.approx(timeline.makespan + 0.05, rel=1e-4)
    costs = action_costs(stages_of(plan, found, BATCH), found).per_stage(2).durations()
    wanted = timeline.costs.per_stage(2).durations()
    for kind in {action.kind for row in plan.table.rows for action in row}:
        assert costs[kind] == pytest.approx(wanted[kind], rel=0.02)
    # What joins devices was found, too.
    assert found.transfer.seconds(1.0) == pytest.approx(real.transfer.seconds(1.0), rel=1e-2)


def test_pauses_become_overhead_of_actions():
    plan = Plan("layers:1", num_microbatches=8, boundaries=(0, 6), remat="none")
    found = corrected(flops(), plan, BATCH, paused(simulate(plan.table, Costs(0.1, 0.2)), 0.03))
    # The first of sixteen has none before it.
    assert found.action == pytest.approx(0.03 * 15 / 16)
    assert predict(plan, found, BATCH).seconds == pytest.approx(8 * 0.3 + 15 * 0.03)


def test_sharing_of_cores_holds_under_other_plans():
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    real = truth(cores=1.0)
    shared = step_of(plan, real)
    # A clock sees actions that were slowed down.
    taken = {}
    for span in shared.spans():
        key = span.action.kind, span.action.stage
        taken.setdefault(key, []).append(span.end - span.start)
    mean = {key: sum(each) / len(each) for key, each in taken.items()}
    usual = Costs([mean["F", n] for n in (0, 1)], [mean["B", n] for n in (0, 1)])
    timeline = Timeline(plan.table, usual, shared.starts, shared.ends)
    found = corrected(flops(cores=1.0), plan, BATCH, timeline, shared.makespan + 0.05)
    for number in (2, 8):
        other = Plan("layers:2", num_microbatches=number, boundaries=(0, 3, 6), remat="none")
        ahead, wanted = (predict(other, each, BATCH).seconds for each in (found, real))
        # One core has no less to do with more microbatches.
        assert ahead == pytest.approx(wanted, rel=0.06)


def test_layers_without_cost_are_equal():
    layers = figures_of_costs([LayerCost(0.0, boundary_bytes=1)] * 4, 4)
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 4), remat="none")
    timeline = simulate(plan.table, Costs([0.3, 0.1], [0.6, 0.2]))
    found = corrected(Figures(tuple(layers)), plan, BATCH, timeline)
    assert [each.takes("F", 4) for each in found.layers] == pytest.approx([0.1] * 4)
    assert [each.takes("B", 4) for each in found.layers] == pytest.approx([0.2] * 4)


def test_optimizer_time_is_not_counted_twice():
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    given = truth()
    update = Figures(given.layers, update=1e-3, optimizer=2.0, transfer=given.transfer)
    timeline = step_of(plan, update)
    found = corrected(update, plan, BATCH, timeline, timeline.makespan + 0.03)
    parts = predict(plan, found, BATCH).parts
    assert parts["optimizer"] == pytest.approx(3 * 8 * 1e-3)
    assert parts["optimizer"] + parts["fixed"] == pytest.approx(0.03, rel=1e-3)


def test_layers_take_time_even_if_overhead_is_too_large():
    """Figures of a slower machine: without layers that take something nothing could be cut."""
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    measured = step_of(plan, truth())
    found = corrected(flops(action=10.0), plan, BATCH, measured)
    assert all(layer.takes("F", 4) > 0 and layer.takes("B", 4) > 0 for layer in found.layers)
    assert predict(Plan("layers:3", num_microbatches=4), found, BATCH).seconds > 0


COSTS = Costs([1.0, 1.3], input_grad=[1.0, 1.2], weight_grad=[0.8, 1.1])


@pytest.mark.parametrize("table", [gpipe, one_f_one_b, zb_h1])
@pytest.mark.parametrize(
    ("load", "forward"), [(1.0, 1.0), (1.0, 1.5), (1.3, 1.5), (1.6, 1.0), (2.0, 1.5)]
)
def test_loads_and_single_durations_are_found(table, load, forward):
    schedule = table(2, 8)
    loads = {"F": forward, "B": load, "I": load, "W": 1.0}
    step = simulate(schedule, COSTS, cores=2, loads=loads)
    costs, found = alone(step, 2, 1)
    wanted = COSTS.per_stage(2).durations()
    for kind in {action.kind for row in schedule.rows for action in row}:
        assert found[kind] == pytest.approx(loads[kind], abs=0.11)
        times = costs.per_stage(2).durations()[kind]
        assert times == pytest.approx(wanted[kind], rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_random_variation_is_not_sharing(seed):
    step = simulate(one_f_one_b(2, 8), COSTS, jitter=0.1, seed=seed)
    costs, loads = alone(step, 2, 1)
    assert max(loads.values()) <= 1.3
    assert costs.per_stage(2).forward == pytest.approx(COSTS.per_stage(2).forward, rel=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_loads_are_found_despite_clock_errors(seed):
    draw = random.Random(seed)
    step = simulate(one_f_one_b(2, 8), COSTS, cores=2, loads={"B": 1.8})
    starts, ends = (
        tuple(tuple(t + draw.uniform(0, 0.02) for t in row) for row in rows)
        for rows in (step.starts, step.ends)
    )
    _, loads = alone(Timeline(step.schedule, step.costs, starts, ends), 2, 1)
    assert loads["B"] == pytest.approx(1.8, abs=0.21) and loads["F"] < 1.2


def test_too_few_cores_slow_all_devices_under_any_load():
    step = simulate(gpipe(4, 8), Costs(1, 2), cores=2)
    costs, loads = alone(step, 2, 1)
    assert set(loads.values()) == {1} and costs.per_stage(4).forward == pytest.approx((1,) * 4)


def test_separate_cores_need_no_correction():
    step = simulate(gpipe(2, 4), COSTS)
    assert alone(step, None, 1) == (COSTS, {"F": 1, "B": 1})
    assert alone(step, 1, 2)[1] == {"F": 1, "B": 1}


def test_several_steps_give_reliable_loads():
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
