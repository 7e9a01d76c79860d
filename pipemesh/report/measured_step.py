"""A measured step: the parts of its time, and figures of layers that are corrected by it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from pipemesh.errors import PlanError
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import Curve, LayerFigures
from pipemesh.plan.network import Link
from pipemesh.plan.stages import Stages, action_costs, stages_of
from pipemesh.schedule import Costs, Timeline, simulate
from pipemesh.schedule.simulate import run_table
from pipemesh.schedule.table import NOTHING, Table, compile_table


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the time of a step.

    Attributes:
        name: its name.
        time: its length, in the unit of the timeline; below 0 if it made the step shorter.
        about: its meaning.
    """

    name: str
    time: float
    about: str


def parts_of(measured: Timeline) -> list[Part]:
    """Splits a measured makespan into parts.

    The schedule is simulated again and again, each time with one more cause of delay. The part of
    a cause is the growth of the makespan. The last simulation is the measured step, so the parts
    add up.

    Args:
        measured: the measured step; its costs are the median durations of each stage's actions.

    Returns:
        The parts: work, filling and draining, imbalance, variation, overhead, transfers, and, if
        there is some, overlap. Up to imbalance they are the makespan that follows from the costs.
        Overhead and transfers are never below 0, overlap is never above.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> costs = Costs(forward=[1, 2], backward=[2, 4], transfer=0.5)
        >>> real = simulate(gpipe(2, 2), costs)
        >>> measured = Timeline(real.schedule, Costs([1, 2], [2, 4]), real.starts, real.ends)
        >>> [(part.name, part.time) for part in parts_of(measured) if part.time]
        [('work', 9.0), ('filling and draining', 4.5), ('imbalance', 1.5), ('transfers', 1.0)]
        >>> measured.makespan
        16.0
    """
    schedule, costs = measured.schedule, measured.costs
    by_kind = costs.per_stage(schedule.num_stages).durations()
    equal = Costs(*(statistics.fmean(by_kind[kind]) for kind in _KINDS))
    predicted = simulate(schedule, costs)
    table = compile_table(schedule)
    durations = [
        [end - start for start, end in zip(*row, strict=True)]
        for row in zip(measured.starts, measured.ends, strict=True)
    ]
    delays = _delays(table, measured)

    def replayed(waited: Callable[[float, bool], float]) -> float:
        """Returns the makespan of actions with the measured durations that wait so long."""
        waits = [[waited(delay, is_own) for delay, is_own in row] for row in delays]
        _, ends = run_table(schedule, table, durations, delays=waits)
        return max(row[-1] for row in ends if row)

    makespans = [
        sum(predicted.busy) / schedule.num_devices,
        simulate(schedule, equal).makespan,
        predicted.makespan,
        replayed(lambda delay, is_own: 0.0),
        replayed(lambda delay, is_own: max(0.0, delay) if is_own else 0.0),
        replayed(lambda delay, is_own: max(0.0, delay)),
        replayed(lambda delay, is_own: delay),
    ]
    names = (
        ("work", "all actions, if every device did an equal share and never waited"),
        ("filling and draining", "waiting in this order of actions, with equal stages"),
        ("imbalance", "waiting because stages take different times"),
        ("variation", "actions that took longer, or shorter, than the median of their stage"),
        ("overhead", "time between two actions of a device that had all inputs"),
        ("transfers", "time from the end of an action until another device used its result"),
        ("overlap", "actions that started with the first results of another, before it had ended"),
    )
    before = [0.0, *makespans]
    return [
        Part(name, now - then, about)
        for (name, about), now, then in zip(names, makespans, before, strict=False)
        if name != "overlap" or now != then
    ]


@dataclasses.dataclass(frozen=True)
class Waits:
    """Mean waits that the schedule does not explain, in the unit of the timeline."""

    own: float  # Before an action, although its device was free and all inputs were available.
    # From the end of an action until another device that waited for it used its result.
    sent: float


def waits_of(measured: Timeline) -> Waits:
    """Returns the waits of a measured step that its schedule does not explain."""
    delays = _delays(compile_table(measured.schedule), measured)
    own = statistics.fmean(delay if is_own else 0.0 for row in delays for delay, is_own in row)
    sent = [delay for row in delays for delay, is_own in row if not is_own]
    # An action begins with its first result's arrival, and may so begin before another has ended.
    return Waits(max(0.0, own), max(0.0, statistics.fmean(sent)) if sent else 0.0)


def _delays(table: Table, measured: Timeline) -> list[list[tuple[float, bool]]]:
    """Returns the unexplained wait of each action, and whether its own device caused it."""
    end = [0.0] * table.num_codes
    for codes, ends in zip(table.codes, measured.ends, strict=True):
        for code, time in zip(codes, ends, strict=True):
            end[code] = time
    delays: list[list[tuple[float, bool]]] = []
    for device, starts in enumerate(measured.starts):
        delays.append([])
        before = 0.0
        for tick, start in enumerate(starts):
            source = table.waits[device][tick]
            arrived = end[source] if source != NOTHING else 0.0
            is_own = arrived <= before or not table.remote[device][tick]
            delays[-1].append((start - max(before, arrived), is_own))
            before = measured.ends[device][tick]
    return delays


# Devices that share cores slow each other down, so durations are corrected in rounds.
_ROUNDS = 12
# The least share of an action's time that its layers take; the rest is overhead.
_LEAST = 0.1
# Number of loads that are tried, evenly from the least to the most; rounds over all kinds.
_STEPS, _SWEEPS = 10, 2
# An action keeps one core busy, unless another load explains this share of the differences.
_EXPLAINED = 0.1
# The most that one action counts: an outlier ran beside something else.
_CAP = 0.1
_KINDS = ("F", "B", "I", "W")


def corrected(
    figures: Figures,
    plan: Plan,
    batch: int,
    measured: Timeline,
    seconds: float | None = None,
    others: Sequence[Timeline] = (),
) -> Figures:
    """Corrects figures so that the timed step takes as long as it did.

    * Each layer of a stage takes its share of the median duration of the stage's actions. The
      dependence of times on rows, and the shares of layers, stay as in the figures.
    * Devices that share cores slowed each other down as `alone` finds.
    * The overhead of an action is the mean pause between two actions of a device, or that of the
      figures if it is larger.
    * The link is as slow as results were late on other devices.
    * The rest of the step, without pipeline, optimizer and gradients, is fixed.

    Args:
        figures: figures of the layers; seconds in any unit, since they are scaled.
        plan: the plan of the step, with boundaries.
        batch: rows of a batch.
        measured: the timed step in seconds; its costs are the median durations of actions.
        seconds: of the whole step; None if they are not known.
        others: more timed steps of the same plan.

    Returns:
        The corrected figures.

    Raises:
        PlanError: no forecast exists for such a plan.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.figures import figures_of_costs
        >>> from pipemesh.schedule import Costs, gpipe, simulate
        >>> flops = Figures(tuple(figures_of_costs([LayerCost(1.0), LayerCost(3.0)], rows=4)))
        >>> plan = Plan("layers:2", schedule="gpipe", num_microbatches=2, remat="none")
        >>> step = simulate(gpipe(2, 2), Costs([0.1, 0.4], [0.2, 0.8]))
        >>> result = corrected(flops, plan, 8, step, seconds=3.5)
        >>> [round(layer.takes("F", 4), 3) for layer in result.layers], round(result.fixed, 3)
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
    # Recomputation is in none of the timed actions; a device does it in its pauses.
    pause = max(0.0, waits.own - _again(stages, measured))
    beside = max(0.0, figures.action - pause)
    costs, loads = alone(measured, figures.cores, stages.home_size(0), others)
    figures = dataclasses.replace(figures, loads=loads)
    durations = costs.per_stage(number).durations()
    ran = {action.kind for row in measured.schedule.rows for action in row}
    # With sums, which are not scaled, and without the overhead of actions.
    bare = dataclasses.replace(figures, action=0.0)
    expected = action_costs(stages, bare, sums=False, transfers=False).per_stage(number).durations()
    summed = action_costs(stages, bare, transfers=False).per_stage(number).durations()
    layers: list[LayerFigures] = []
    for stage, members in enumerate(stages.layers):
        wanted = {
            kind: max(
                _LEAST * durations[kind][stage],
                durations[kind][stage] - beside - (summed[kind][stage] - expected[kind][stage]),
            )
            for kind in _KINDS
            if kind in ran
        }
        before = {kind: expected[kind][stage] for kind in "FBIW"}
        _complete(wanted, before, loads)
        layers += [_scaled(layer, wanted, before, stages, stage) for layer in members]
    link = figures.transfer
    sent = [link.seconds(of_stage[-1].outputs.at(stages.rows)) for of_stage in stages.layers[:-1]]
    if waits.sent and sent:
        mean = sum(sent) / len(sent)
        factor = waits.sent / mean if mean else 1.0
        link = Link(
            link.latency * factor if mean else waits.sent,
            link.bandwidth / factor,
        )
    result = dataclasses.replace(
        figures,
        layers=tuple(layers),
        action=max(figures.action, pause),
        transfer=link,
        crowding=0.0,
        fixed=0.0,
    )
    result = _as_long(result, plan, batch, measured.makespan)
    if seconds is None:
        return dataclasses.replace(result, fixed=figures.fixed)
    parts = predict(plan, result, batch).parts
    rest = seconds - measured.makespan - parts["gradients"] - parts["optimizer"]
    return dataclasses.replace(result, fixed=max(0.0, rest))


def _again(stages: Stages, measured: Timeline) -> float:
    """Returns the mean time of recomputation before an action: a forward pass of its stage."""
    forward = measured.costs.per_stage(stages.table.num_stages).durations()["F"]
    total = sum(
        forward[action.stage] for row in stages.run.rows for action in row if action.kind == "R"
    )
    return total / sum(map(len, measured.schedule.rows))


def _complete(
    wanted: dict[str, float], before: Mapping[str, float], loads: Mapping[str, float]
) -> None:
    """Adds the kinds of actions that did not run, in proportion to those that did."""
    # If a `B` keeps several cores busy, each half keeps one busy, for as much longer: it has one
    # matmul where a `B` has two.
    halves = before["I"] + before["W"]
    busy = loads.get("B", 1.0)
    if "B" not in wanted:
        whole = wanted.get("I", 0.0) + wanted.get("W", 0.0)
        wanted["B"] = whole * before["B"] / halves if halves else whole
    for kind in ("I", "W"):
        share = before[kind] / before["B"] if before["B"] else 0.5
        wanted.setdefault(kind, wanted["B"] * share * busy)


def _scaled(
    layer: LayerFigures,
    wanted: Mapping[str, float],
    before: Mapping[str, float],
    stages: Stages,
    stage: int,
) -> LayerFigures:
    """Returns a layer that takes its share of the wanted time of its stage."""
    row_counts = [x for x, _ in layer.seconds["F"].points]

    def curve(kind: str) -> Curve:
        if before[kind]:
            factor = wanted[kind] / before[kind]
            return Curve(tuple((x, factor * layer.takes(kind, x)) for x in row_counts))
        # Layers without any cost share equally.
        number = len(stages.layers[stage])
        return Curve(((stages.rows, wanted[kind] / number / stages.part(stage, layer)),))

    seconds = {kind: curve(kind) for kind in "FBIW"}
    # The step's own loads replace the measured work.
    return dataclasses.replace(layer, seconds=seconds, work={})


def _as_long(figures: Figures, plan: Plan, batch: int, makespan: float) -> Figures:
    """Scales the layers until the pipeline takes as long as measured."""
    for _ in range(_ROUNDS):
        prediction = predict(plan, figures, batch)
        behind = sum(prediction.parts[name] for name in ("gradients", "optimizer", "fixed"))
        layers = sum(prediction.parts[name] for name in ("compute", "bubble", "imbalance"))
        off = makespan - (prediction.seconds - behind)
        if layers <= 0 or abs(off) <= 1e-6 * makespan:
            break
        factor = max(0.1, 1 + off / layers)
        figures = dataclasses.replace(
            figures, layers=tuple(layer.faster(1 / factor) for layer in figures.layers)
        )
    return figures


def alone(
    measured: Timeline, cores: float | None, home: int, others: Sequence[Timeline] = ()
) -> tuple[Costs, dict[str, float]]:
    """Returns the durations of actions that run alone, and the cores that each kind keeps busy."""
    # While actions want more cores than there are, all of them run at the rate `cores / wanted`, as
    # in `pipemesh.schedule.simulate`. The more cores an action keeps busy, the faster it is while
    # other devices wait: a `B` has matmuls that do not depend on each other. The loads are fitted:
    # under them, actions of a kind and a stage have done most nearly the same work, however many
    # others ran. `home` devices run each action; `others` make the fit more reliable.
    ran = dict.fromkeys(span.action.kind for span in measured.spans())
    loads = dict.fromkeys(ran, 1.0)
    if cores is None:
        return measured.costs, loads
    most = max(1.0, cores / home)
    candidates = [1 + (most - 1) * step / _STEPS for step in range(_STEPS + 1)]
    steps = (measured, *others)
    first = least = _differing(_works(steps, cores, home, loads))
    for _ in range(_SWEEPS):
        for kind in ran:
            for load in candidates:
                changed = loads | {kind: load}
                difference = _differing(_works(steps, cores, home, changed))
                if difference < least:
                    loads, least = changed, difference
    if least > (1 - _EXPLAINED) * first:
        loads = dict.fromkeys(ran, 1.0)
    works = _works([measured], cores, home, loads)
    stages = measured.schedule.num_stages
    known = measured.costs.per_stage(stages).durations()
    fields = [
        [
            round(statistics.median(works[kind, stage]), 12)
            if (kind, stage) in works
            else known[kind][stage]
            for stage in range(stages)
        ]
        for kind in _KINDS
    ]
    return Costs(*fields), loads


def _works(
    steps: Sequence[Timeline], cores: float, home: int, loads: Mapping[str, float]
) -> dict[tuple[str, int], list[float]]:
    """Returns the work of each action of several steps, in seconds that it takes alone, by kind and
    stage.
    """
    works: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for step in steps:
        changes: dict[float, float] = collections.defaultdict(float, {0.0: 0.0})
        for span in step.spans():
            load = home * loads[span.action.kind]
            changes[span.start] += load
            changes[span.end] -= load
        times = sorted(changes)
        done, wanted = {times[0]: 0.0}, 0.0
        for before, now in itertools.pairwise(times):
            wanted += changes[before]
            rate = min(1.0, cores / wanted) if wanted > 0 else 1.0
            done[now] = done[before] + rate * (now - before)
        for span in step.spans():
            works[span.action.kind, span.action.stage].append(done[span.end] - done[span.start])
    return works


def _differing(works: Mapping[tuple[str, int], Sequence[float]]) -> float:
    """Returns how much actions of a stage differ, as a sum of squared shares."""
    differing = 0.0
    for values in works.values():
        if usual := statistics.median(values):
            differing += sum(min(_CAP, (value / usual - 1) ** 2) for value in values)
    return differing
