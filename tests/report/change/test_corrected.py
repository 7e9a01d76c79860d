"""Figures that a timed step has corrected give that step back, and say what another would take."""

import random

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import Curve, LayerFigures, figures_of_costs
from pipemesh.plan.network import Link
from pipemesh.plan.stages import action_costs, stages_of
from pipemesh.report.change import corrected
from pipemesh.schedule import Costs, Timeline, simulate, simulate_sharing

BATCH = 16


def flops(count=6, rows=4, **more):
    """Layers whose seconds are flops, as a record has them."""
    layers = figures_of_costs(
        [LayerCost(1e9 * (1 + n), backward=2e9 * (1 + n)) for n in range(count)], rows
    )
    layers = [LayerFigures(e.name, e.seconds, 8, e.kept, Curve(((rows, 1.0),))) for e in layers]
    return Figures(tuple(layers), **more)


def step_of(plan, figures, real):
    """The step that figures make of a plan, without the time outside of its pipeline."""
    stages = stages_of(plan, figures, BATCH)
    costs = action_costs(stages, figures)
    if figures.cores is None:
        return seen(simulate(stages.run, costs), plan) if real else costs
    return seen(simulate_sharing(stages.run, costs, cores=figures.cores), plan)


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
    costs = []
    for _ in range(6):
        forward = draw.uniform(0.01, 0.02)
        costs.append(
            LayerCost(
                forward,
                backward=draw.uniform(1.5, 2.5) * forward,
                parameter_bytes=8.0,
                activation_bytes=4.0,
                boundary_bytes=1.0,
            )
        )
    link = Link(2e-3, 1e9)
    return Figures(tuple(figures_of_costs(costs, 4)), fixed=0.05, transfer=link, cores=cores)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("base", ["flops", "figures"])
def test_the_step_that_was_timed_is_given_back(schedule, remat, base):
    cuts = (0, 2, 6)
    plan = Plan("layers:2", schedule=schedule, num_microbatches=4, boundaries=cuts, remat=remat)
    real = truth()
    timeline = step_of(plan, real, True)
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


def test_pauses_between_actions_are_the_overhead_of_each():
    plan = Plan("layers:1", num_microbatches=8, boundaries=(0, 6), remat="none")
    real = simulate(plan.table, Costs(0.1, 0.2))
    starts, ends = (
        (tuple(time + 0.03 * n for n, time in enumerate(row)),)
        for (row,) in (real.starts, real.ends)
    )
    found = corrected(flops(), plan, BATCH, Timeline(plan.table, real.costs, starts, ends))
    # The first of sixteen has none before it.
    assert found.action == pytest.approx(0.03 * 15 / 16)
    assert predict(plan, found, BATCH).seconds == pytest.approx(8 * 0.3 + 15 * 0.03)


def test_devices_that_slowed_each_other_down_do_so_under_other_plans():
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    real = truth(cores=1.0)
    shared = step_of(plan, real, True)
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


def test_of_layers_without_any_cost_all_are_alike():
    nothing, line = Curve(((4, 0.0),)), Curve(((4, 1.0),))
    layers = [LayerFigures(str(n), {"F": nothing, "B": nothing}, 0, nothing, line) for n in "abcd"]
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 4), remat="none")
    timeline = simulate(plan.table, Costs([0.3, 0.1], [0.6, 0.2]))
    found = corrected(Figures(tuple(layers)), plan, BATCH, timeline)
    assert [each.takes("F", 4) for each in found.layers] == pytest.approx([0.1] * 4)
    assert [each.takes("B", 4) for each in found.layers] == pytest.approx([0.2] * 4)


def test_what_is_outside_of_the_pipeline_is_not_counted_twice():
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    given = truth()
    update = Figures(given.layers, update=1e-3, optimizer=2.0, transfer=given.transfer)
    timeline = step_of(plan, update, True)
    found = corrected(update, plan, BATCH, timeline, timeline.makespan + 0.03)
    parts = predict(plan, found, BATCH).parts
    assert parts["optimizer"] == pytest.approx(3 * 8 * 1e-3)
    assert parts["optimizer"] + parts["fixed"] == pytest.approx(0.03, rel=1e-3)


def test_layers_take_something_where_actions_took_less_than_they_should_besides():
    """Figures of a slower machine: without layers that take something nothing could be cut."""
    plan = Plan("layers:2", num_microbatches=4, boundaries=(0, 3, 6), remat="none")
    measured = step_of(plan, truth(), real=True)
    found = corrected(flops(action=10.0), plan, BATCH, measured)
    assert all(layer.takes("F", 4) > 0 and layer.takes("B", 4) > 0 for layer in found.layers)
    assert predict(Plan("layers:3", num_microbatches=4), found, BATCH).seconds > 0
