"""Figures of layers, moved to where a step that was timed says that they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pipemesh.errors import PlanError
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import Curve, LayerFigures
from pipemesh.plan.network import Link
from pipemesh.plan.stages import Stages, action_costs, stages_of
from pipemesh.report.change.sharing import alone
from pipemesh.report.difference import waits_of
from pipemesh.schedule import Timeline

# Devices that share cores slow each other down, so what an action takes alone is found in rounds.
_ROUNDS = 12
# Layers take at least this share of what their action takes, whatever it takes besides.
_LEAST = 0.1


def corrected(
    figures: Figures,
    plan: Plan,
    batch: int,
    measured: Timeline,
    seconds: float | None = None,
    others: Sequence[Timeline] = (),
) -> Figures:
    """Figures by which the step that was timed takes as long as it did.

    * Each layer of a stage takes its share of what the stage's actions usually took. How times
      depend on rows, and which share of a stage is a layer's, is as figures had it.
    * Devices that share cores slowed each other down as `alone` finds.
    * An action takes besides what devices paused on average between two of them, or what figures
      say, if that is more.
    * The link is as slow as results were late on other devices.
    * What a step took outside of its pipeline, and is no optimizer and no gradient, is fixed.

    Args:
        figures: of the layers; seconds in any unit, since they are scaled.
        plan: that the step ran under, with boundaries.
        batch: rows.
        measured: when its actions ran, in seconds; the costs are their usual durations.
        seconds: of the whole step; None if they are not known.
        others: more steps that were timed, of the same plan.

    Raises:
        PlanError: nothing can be said of such a plan.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.figures import figures_of_costs
        >>> from pipemesh.schedule import Costs, gpipe, simulate
        >>> flops = Figures(tuple(figures_of_costs([LayerCost(1.0), LayerCost(3.0)], rows=4)))
        >>> plan = Plan("layers:2", schedule="gpipe", num_microbatches=2, remat="none")
        >>> step = simulate(gpipe(2, 2), Costs([0.1, 0.4], [0.2, 0.8]))
        >>> found = corrected(flops, plan, 8, step, seconds=3.5)
        >>> [round(layer.takes("F", 4), 3) for layer in found.layers], round(found.fixed, 3)
        ([0.1, 0.4], 0.8)
    """
    if not plan.mesh.is_even:
        raise PlanError(
            f"mesh '{plan.mesh}' has homes of different sizes, which are not corrected for; "
            "give each axis one size"
        )
    stages = stages_of(plan, figures, batch)
    waits = waits_of(measured)
    number = stages.table.num_stages
    # What is computed again is in none of the actions; a device does it when it would pause.
    own = max(0.0, waits.own - _again(stages, measured))
    beside = max(0.0, figures.action - own)
    costs, loads = alone(measured, figures.cores, stages.home_size(0), others)
    figures = dataclasses.replace(figures, loads=loads)
    durations = costs.per_stage(number).durations()
    ran = {action.kind for row in measured.schedule.rows for action in row}
    # With sums, which are not scaled, and without what actions take besides.
    bare = dataclasses.replace(figures, action=0.0)
    expected = action_costs(stages, bare, sums=False, transfers=False).per_stage(number).durations()
    summed = action_costs(stages, bare, transfers=False).per_stage(number).durations()
    layers: list[LayerFigures] = []
    for stage, members in enumerate(stages.layers):
        wanted = {
            kind: max(
                _LEAST * durations[kind][stage],
                durations[kind][stage] - beside - _sums(summed, expected, kind, stage),
            )
            for kind in "FBIW"
            if kind in ran
        }
        there = {kind: expected[kind][stage] for kind in "FBIW"}
        _complete(wanted, there, loads)
        layers += [_scaled(layer, wanted, there, stages, stage) for layer in members]
    link = figures.transfer
    sent = [link.seconds(of_stage[-1].outputs.at(stages.rows)) for of_stage in stages.layers[:-1]]
    if waits.sent and sent:
        mean = sum(sent) / len(sent)
        factor = waits.sent / mean if mean else 1.0
        link = Link(
            link.latency * factor if mean else waits.sent,
            link.bandwidth / factor,
        )
    found = dataclasses.replace(
        figures,
        layers=tuple(layers),
        action=max(figures.action, own),
        transfer=link,
        crowding=0.0,
        fixed=0.0,
    )
    found = _as_long(found, plan, batch, measured.makespan)
    if seconds is None:
        return dataclasses.replace(found, fixed=figures.fixed)
    parts = predict(plan, found, batch).parts
    rest = seconds - measured.makespan - parts["gradients"] - parts["optimizer"]
    return dataclasses.replace(found, fixed=max(0.0, rest))


def _again(stages: Stages, measured: Timeline) -> float:
    """What an action is preceded by on average that computes again: a forward pass of its stage."""
    forward = measured.costs.per_stage(stages.table.num_stages).durations()["F"]
    total = sum(forward[each.stage] for row in stages.run.rows for each in row if each.kind == "R")
    return total / sum(map(len, measured.schedule.rows))


def _sums(
    summed: Mapping[str, tuple[float, ...]],
    expected: Mapping[str, tuple[float, ...]],
    kind: str,
    stage: int,
) -> float:
    return summed[kind][stage] - expected[kind][stage]


def _complete(
    wanted: dict[str, float], there: Mapping[str, float], loads: Mapping[str, float]
) -> None:
    """What did not run takes as many times what figures say as what ran in its place.

    Where a `B` keeps several cores busy, each half, which has one product where it has two, keeps
    one busy for as much longer.
    """
    halves = there["I"] + there["W"]
    busy = loads.get("B", 1.0)
    if "B" not in wanted:
        whole = wanted.get("I", 0.0) + wanted.get("W", 0.0)
        wanted["B"] = whole * there["B"] / halves if halves else whole
    for kind in ("I", "W"):
        share = there[kind] / there["B"] if there["B"] else 0.5
        wanted.setdefault(kind, wanted["B"] * share * busy)


def _scaled(
    layer: LayerFigures,
    wanted: Mapping[str, float],
    there: Mapping[str, float],
    stages: Stages,
    stage: int,
) -> LayerFigures:
    """A layer that takes its share of what is wanted of its stage."""
    places = [x for x, _ in layer.seconds["F"].points]

    def curve(kind: str) -> Curve:
        if there[kind]:
            factor = wanted[kind] / there[kind]
            return Curve(tuple((x, factor * layer.takes(kind, x)) for x in places))
        # Of layers that have no cost all are alike.
        number = len(stages.layers[stage])
        return Curve(((stages.rows, wanted[kind] / number * stages.shared(stage, layer)),))

    seconds = {kind: curve(kind) for kind in "FBIW"}
    # Cores are as busy as the step says.
    return dataclasses.replace(layer, seconds=seconds, work={})


def _as_long(figures: Figures, plan: Plan, batch: int, makespan: float) -> Figures:
    """The figures with layers so fast that the pipeline takes as long as was measured."""
    for _ in range(_ROUNDS):
        found = predict(plan, figures, batch)
        behind = sum(found.parts[name] for name in ("gradients", "optimizer", "fixed"))
        layers = found.parts["compute"] + found.parts["bubble"] + found.parts["imbalance"]
        off = makespan - (found.seconds - behind)
        if layers <= 0 or abs(off) <= 1e-6 * makespan:
            break
        factor = max(0.1, 1 + off / layers)
        figures = dataclasses.replace(
            figures, layers=tuple(layer.faster(1 / factor) for layer in figures.layers)
        )
    return figures
