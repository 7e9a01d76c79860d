"""Forecasts of a step: its time, its parts, its bubble and its memory."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan.figures import MODEL, Figures, LayerFigures
from pipemesh.plan.homes import home_of
from pipemesh.plan.network import Network
from pipemesh.plan.plan import Plan
from pipemesh.plan.remat import Remat
from pipemesh.plan.stages import (
    StageMemory,
    Stages,
    action_costs,
    action_loads,
    alike_cuts,
    bytes_of,
    device_memory,
    even_costs,
    even_loads,
    exchanged,
    gradient_sum,
    in_dtype,
    stages_of,
    weight_fetch,
)
from pipemesh.schedule import Costs, Timeline, gpipe, simulate
from pipemesh.schedule.builders import is_looped, looped_ticks
from pipemesh.schedule.timeline import gradient_sums

_Loads = Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class StepForecast:
    """The forecast of a step of some stages."""

    seconds: float
    bubble: float  # Share of the time that devices wait for each other while a core is free.
    memory: tuple[float, ...]  # bytes of one device of each home
    work: float = 0.0  # core seconds of all devices, however they share cores
    # Seconds that each part adds to the step, none below 0; empty unless requested. `compute`, the
    # work spread evenly over all devices or cores; `actions`, their overhead; `bubble`; `imbalance`
    # of the stages; `sums` of devices that share layers; `transfers`; `gradients` of replicas;
    # `optimizer`; `fixed`.
    parts: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def binds(self) -> str:
        """Returns the largest part besides computing; "" if parts were not requested."""
        others = {name: value for name, value in self.parts.items() if name != "compute"}
        return max(others, key=others.__getitem__) if others else ""


@dataclasses.dataclass(frozen=True)
class Prediction(StepForecast):
    """The forecast of a step under a plan.

    Attributes:
        plan: the plan; see `StepForecast` for the rest.
        supposed: assumptions that no figures support; "" if there are none.

    Example:
        >>> from pipemesh.plan import Figures, figures_of_costs
        >>> from pipemesh.partition import LayerCost
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 2, rows=1)))
        >>> predict(Plan("layers:2", num_microbatches=2), figures, batch=2).binds
        'bubble'
    """

    plan: Plan = dataclasses.field(kw_only=True)
    supposed: str = ""


def predict(
    plan: Plan, figures: Figures, batch: int, *, parts: bool = True, network: Network | None = None
) -> Prediction:
    """Forecasts a step under a plan.

    Simulates the schedule with the figures of the layers. Devices that share cores slow each other
    down (`pipemesh.schedule.simulate`). Under `lowering=simd` all devices compute the layers before
    and behind the alike ones together, on the whole batch, and the ticks of a loop between them,
    also those without work.

    Args:
        plan: the plan. Its `compute_dtype` changes the forecast of bytes, not of seconds.
        figures: figures of the model's layers on the machine.
        batch: rows of a batch.
        parts: whether to split the step into parts, which takes three more simulations.
        network: the hosts of the devices; None if the figures' links connect the devices.

    Raises:
        PlanError: the batch or the layers do not divide, or this kind of plan has no forecast.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.figures import figures_of_costs
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 4, rows=1)))
        >>> found = predict(Plan("layers:2", num_microbatches=4, remat="none"), figures, batch=4)
        >>> found.seconds, found.parts["bubble"], found.binds
        (30.0, 6.0, 'bubble')
    """
    supposed: list[str] = []
    if plan.lowering == "simd":
        program = _program_of(plan, figures, batch, network)
        forecast = _forecast_program(program, figures, parts=parts)
        if (over := _over_layers(plan)).rules and figures.layout_of(over) is None:
            supposed.append(
                f"figures do not know how layers are split by the rules of '{plan.layout}' for the "
                f"axis {LAYERS_AXIS!r}, so they are split as by '{figures.rules}'"
            )
    else:
        forecast = forecast_stages(stages_of(plan, figures, batch, network), figures, parts=parts)
    if bytes_of(plan.compute_dtype) != bytes_of(None):
        supposed.append(
            f"what layers compute takes as long in {plan.compute_dtype} as it was measured, only "
            "bytes are forecast"
        )
    if figures.layout_of(plan.layout) is None:
        supposed.append(
            f"figures do not know how '{plan.layout}' splits layers, so they are split as by "
            f"'{figures.rules}'"
        )
    return Prediction(**vars(forecast), plan=plan, supposed="; ".join(supposed))


def forecast_stages(
    stages: Stages,
    figures: Figures,
    *,
    parts: bool = True,
    fewer: Stages | None = None,
    num_microbatches: int = 0,
) -> StepForecast:
    """Forecasts a step of some stages; extrapolates to `num_microbatches` if there is `fewer`."""
    # In the steady state each microbatch adds the same time, so two tables, `stages` and `fewer`,
    # give the time of `num_microbatches`.
    run = _run(stages, figures, parts)
    if fewer is not None:
        here, there = stages.table.num_microbatches, fewer.table.num_microbatches
        run = run.beyond(_run(fewer, figures, parts), (num_microbatches - here) / (here - there))
    sums = _gradient_sums(stages, figures)
    update, after = _update(stages, figures, sums)
    with_gradients = _end_of_sums(stages, figures, run.ends, sums)
    seconds = with_gradients + update + figures.fixed
    done = run.done + after + figures.fixed
    *before, _ = run.lengths
    makespan = max(run.ends)
    bubble = min(1.0, max(0.0, run.waiting) / makespan) if makespan else 0.0
    if not parts:
        return StepForecast(seconds, bubble, run.memory, done)
    by_part = _parts((*before, makespan), run.actions) | {
        "gradients": with_gradients - makespan,
        "optimizer": update,
        "fixed": figures.fixed,
    }
    return StepForecast(seconds, bubble, run.memory, done, by_part)


def _parts(lengths: Sequence[float], actions: float) -> dict[str, float]:
    """Returns the parts of a step from its lengths as each is added, in the order of
    `_Run.lengths`.
    """
    # Some tables are shorter for unequal stages, and on shared cores some actions may be faster as
    # others wait. No part may be below 0.
    rising = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        rising.insert(0, min(length, rising[0]))
    compute, even, cut, summed, whole = rising
    return {
        "compute": compute - min(compute, actions),
        "actions": min(compute, actions),
        "bubble": even - compute,
        "imbalance": cut - even,
        "sums": summed - cut,
        "transfers": whole - summed,
    }


@dataclasses.dataclass(frozen=True)
class _Run:
    """Results of simulating a table; all of them grow linearly with many microbatches."""

    # The time of all work spread evenly, then makespans with equal stages, with the given stages,
    # with sums, and with transfers. Only the last one if parts are not requested.
    lengths: tuple[float, ...]
    ends: tuple[float, ...]  # end of the last action of each stage
    memory: tuple[float, ...]  # bytes of each home
    waiting: float  # mean seconds that devices wait for each other
    done: float  # core seconds of all actions on all devices
    actions: float  # overhead of the actions of a device

    def beyond(self, before: _Run, times: float) -> _Run:
        """Extrapolates from an earlier run by a multiple of the distance to it."""

        def on(here: Any, there: Any) -> Any:
            if isinstance(here, tuple):
                return tuple(map(on, cast("tuple[float, ...]", here), there))
            return here + (here - there) * times

        return _Run(*map(on, vars(self).values(), vars(before).values()))


def _run(stages: Stages, figures: Figures, parts: bool) -> _Run:
    costs = action_costs(stages, figures)
    loads = action_loads(stages, figures, costs)
    timeline = _simulated(stages, figures, costs, loads)
    places = range(stages.table.num_devices)
    memory = tuple(device_memory(stages, figures, place) for place in places)
    waiting = _waiting(timeline, stages, figures, loads) * timeline.makespan
    done = _work(timeline, stages, loads) + _fetching(timeline, stages, figures)
    if not parts:
        return _Run((timeline.makespan,), timeline.stage_ends, memory, waiting, done, 0.0)
    number = stages.table.num_stages
    work = action_costs(stages, figures, sums=False, transfers=False)
    added = action_costs(stages, figures, transfers=False)
    even = even_costs(work, number)
    loads = action_loads(stages, figures, work, sums=False)
    alike = even_loads(loads, work, number)
    lone = simulate(stages.run, even)
    # If cores are scarce, all of them compute at once.
    scale = _slowed(lone, stages, figures, alike)
    lengths = (
        sum(lone.busy) / len(lone.busy) * scale,
        _simulated(stages, figures, even, alike, differ=False).makespan,
        _simulated(stages, figures, work, loads).makespan,
        _simulated(stages, figures, added, action_loads(stages, figures, added)).makespan,
        timeline.makespan,
    )
    actions = sum(map(len, stages.table.rows)) * figures.action / len(lone.busy) * scale
    return _Run(lengths, timeline.stage_ends, memory, waiting, done, actions)


def _simulated(
    stages: Stages, figures: Figures, costs: Costs, loads: _Loads, differ: bool = True
) -> Timeline:
    """Simulates the stages; `differ`: whether slices of a sequence take their own times."""
    shares = stages.slice_shares if differ else ()
    if figures.cores is None:
        return simulate(stages.run, costs, slice_shares=shares)
    # All devices of a home run each action.
    every = {
        kind: [stages.home_size(stage) * load for stage, load in enumerate(by_stage)]
        for kind, by_stage in loads.items()
    }
    return simulate(
        stages.run,
        costs,
        cores=figures.cores,
        loads=every,
        crowding=figures.crowding,
        slice_shares=shares,
    )


def _work(timeline: Timeline, stages: Stages, loads: _Loads) -> float:
    """Returns the core seconds of all actions on all devices."""
    durations = timeline.costs.per_stage(timeline.schedule.num_stages).durations()
    return sum(
        stages.home_size(action.stage)
        * durations[action.kind][action.stage]
        * loads[action.kind][action.stage]
        for row in timeline.schedule.rows
        for action in row
    )


def _fetching(timeline: Timeline, stages: Stages, figures: Figures) -> float:
    """Returns the core seconds of all fetches of weights beside actions."""
    return sum(
        stages.home_size(each.stage) * weight_fetch(stages, figures, each.stage)[1]
        for each in timeline.fetches
    )


def _slowed(lone: Timeline, stages: Stages, figures: Figures, loads: _Loads) -> float:
    """Returns the slowdown of all work on shared cores, relative to one device alone."""
    if figures.cores is None:
        return 1.0
    busiest = sum(lone.busy) / len(lone.busy)
    wanted = _work(lone, stages, loads)
    return max(1.0, wanted / figures.cores / busiest) if busiest else 1.0


def _waiting(timeline: Timeline, stages: Stages, figures: Figures, loads: _Loads) -> float:
    """Returns the share of the time that devices wait for each other while a core is free."""
    if figures.cores is None:
        return timeline.bubble_ratio
    used = {action.kind for row in stages.run.rows for action in row}
    # A device keeps at most this number of cores busy.
    most = max(load for kind in used for load in loads[kind])
    available = min(figures.cores, sum(stages.home_sizes) * most) * timeline.makespan
    free = 1 - _work(timeline, stages, loads) / available if available else 0.0
    # Cores that one device leaves idle itself, as a forward pass does beside a backward one, are
    # not waiting time.
    return max(0.0, min(timeline.bubble_ratio, free))


_Sums = Sequence[tuple[float, float]]


def _gradient_sums(stages: Stages, figures: Figures) -> _Sums:
    """Returns `gradient_sum` of each stage."""
    return [gradient_sum(stages, figures, stage) for stage in range(len(stages.layers))]


def _update(stages: Stages, figures: Figures, sums: _Sums) -> tuple[float, float]:
    """Returns the seconds of the update, and its work with that of the sums of gradients."""
    weights = [0.0] * stages.table.num_devices
    for stage, place in enumerate(stages.table.stage_devices):
        weights[place] += stages.trained(stage)
    work = sum(stages.home_size(stage) * done for stage, (_, done) in enumerate(sums))
    # Each replica updates its share.
    seconds = [size / stages.replicas * figures.update for size in weights]
    updates = sum(map(operator.mul, stages.home_sizes, seconds))
    if figures.cores is None:
        return max(seconds), work + updates
    # All devices update their weights at once, on the available cores.
    largest = max(
        layer.trained_bytes * stages.held_part(stage, layer)
        for stage, layers in enumerate(stages.layers)
        for layer in layers
    )
    alone = largest / stages.replicas * figures.update
    return max(alone, updates / figures.cores), work + updates


def _end_of_sums(stages: Stages, figures: Figures, ends: Sequence[float], sums: _Sums) -> float:
    """Returns when the last sum of gradients ends, of stages that are done at `ends`."""
    places, seconds = stages.table.stage_devices, [seconds for seconds, _ in sums]
    if figures.cores is not None:
        # The cores that add do not compute the device's other stages meanwhile.
        of_home = dict.fromkeys(places, 0.0)
        for place, end in zip(places, ends, strict=True):
            of_home[place] = max(of_home[place], end)
        ends = [of_home[place] for place in places]
    # Without fetches for single actions, which may delay a sum a little on the same link.
    return max([*ends, *(each.end for each in gradient_sums(ends, places, seconds))])


def _over_layers(plan: Plan) -> LayoutRules:
    """Returns the rules for the axis `layers`, as rules for devices that share layers."""
    return LayoutRules(
        tuple((dim, MODEL) for dim, axis in plan.layout.rules if axis == LAYERS_AXIS)
    )


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program for all devices: layers before a loop over ticks, the stages in it, and layers
    behind it.
    """

    # One stage each, or without layers. All devices compute it at once, on all microbatches.
    before: Stages
    behind: Stages
    loop: Stages

    @functools.cached_property
    def num_ticks(self) -> int:
        """Returns the number of ticks of a pass through all stages."""
        table = self.loop.table
        rounds = table.num_stages // table.num_devices
        return looped_ticks(table.num_devices, table.num_microbatches, rounds)

    @property
    def num_devices(self) -> int:
        """Returns the number of devices, which all compute at all times."""
        return sum(self.loop.home_sizes)


def _program_of(plan: Plan, figures: Figures, batch: int, network: Network | None) -> _Program:
    """Returns the program of a plan with `lowering=simd`."""
    plan.check_batch(batch)
    plan.check_layers(len(figures.layers))
    cuts = alike_cuts(plan, figures)
    for name, value, is_right, way_out in (
        ("schedule", plan.schedule, is_looped(plan.table), "'gpipe' or 'looped_bfs:V'"),
        ("remat", plan.remat, plan.remat.is_full, "'full'"),
        ("boundaries", plan.boundaries, plan.boundaries in (None, cuts), f"{cuts}"),
    ):
        if not is_right:
            raise PlanError(f"{name} is '{value}', but lowering=simd runs {way_out}; use that")
    begin, end = figures.alike
    replicas, cores = plan.num_replicas, plan.mesh.num_stages
    group = len(home_of(plan.mesh, plan.layout, 0)) // replicas
    rules, rows = figures.layout_of(plan.layout) or "", batch / replicas
    over, strides = figures.layout_of(_over_layers(plan)) or "", (replicas * group, group)
    if not _over_layers(plan).rules:
        over, strides = rules, None

    def end_of(layers: tuple[LayerFigures, ...]) -> Stages:
        groups = (cores if strides else group,)
        stages = Stages(
            (layers,),
            rows,
            replicas,
            groups,
            Remat.NONE,
            gpipe(1, 1),
            network,
            rules=over,
            strides=strides,
        )
        return in_dtype(stages, plan)

    number = (end - begin) // plan.num_stages
    loop = Stages(
        tuple(figures.layers[at : at + number] for at in range(begin, end, number)),
        rows / plan.num_microbatches,
        replicas,
        (group,) * plan.num_stages,
        plan.remat,
        plan.table,
        network,
        rules=rules,
    )
    return _Program(
        end_of(figures.layers[:begin]), end_of(figures.layers[end:]), in_dtype(loop, plan)
    )


def _forecast_program(program: _Program, figures: Figures, *, parts: bool) -> StepForecast:
    """Forecasts a step of one program for all devices."""
    loop, ticks = program.loop, 2 * program.num_ticks
    table = loop.table
    cores, devices = table.num_devices, program.num_devices
    useful = 2 * table.num_microbatches * table.num_stages // cores
    ends = [stages for stages in (program.before, program.behind) if stages.layers[0]]

    @functools.cache
    def tick(sums: bool) -> tuple[float, float]:
        """Returns the mean of a tick forward and one backward."""
        seconds, work = _at_once(loop, figures, devices, "FBR", sums=sums)
        return seconds / 2, work / 2

    def of_ends(sums: bool) -> list[tuple[float, float]]:
        return [_at_once(stages, figures, devices, "FB", sums=sums) for stages in ends]

    # The input of each tick comes from a neighbour, the outputs of the loop go to all cores.
    passed = loop.passed(0)
    sent = shared = 0.0
    if cores > 1:
        link = figures.transfer
        if loop.network is not None:
            link = loop.network.joining(0, loop.home_sizes[0], loop.home_sizes[0])
        sent = ticks * link.seconds(passed)
        stride, size = loop.home_sizes[0], 2 * (1 - 1 / cores) * table.num_microbatches * passed
        shared, _ = exchanged(loop, figures, figures.transfer, "all_reduce", cores, stride, size)
    computed = [(ticks * tick(True)[0], ticks * tick(True)[1]), *of_ends(True)]
    length = sum(seconds for seconds, _ in computed) + sent + 2 * shared
    sums = [(stages, _gradient_sums(stages, figures)) for stages in (loop, *ends)]
    gradients = sum(_end_of_sums(s, figures, [0.0] * len(of), of) for s, of in sums)
    updates = [_update(stages, figures, of_stages) for stages, of_stages in sums]
    update = sum(seconds for seconds, _ in updates)
    work = sum(done for _, done in computed) + sum(after for _, after in updates) + figures.fixed
    seconds = length + gradients + update + figures.fixed
    idle = (ticks - useful) * tick(False)[0]
    bubble = min(1.0, idle / length) if length else 0.0
    memory = tuple(_program_memory(program, figures, place) for place in range(cores))
    if not parts:
        return StepForecast(seconds, bubble, memory, work)
    # What one device would take, divided by their number.
    group = devices // loop.replicas
    even = 0.0
    for stages in ends:
        whole = dataclasses.replace(stages, groups=(1,), rules="", strides=None)
        even += _at_once(whole, figures, devices, "FB", sums=False, share=1 / group)[0]
    once = sum(seconds for seconds, _ in of_ends(False))
    all_ticks = ticks * tick(False)[0]
    lengths = (
        useful * tick(False)[0] + even,
        all_ticks + even,
        all_ticks + once,
        sum(seconds for seconds, _ in computed),
        length,
    )
    by_part = _parts(lengths, useful * figures.action) | {
        "gradients": gradients,
        "optimizer": update,
        "fixed": figures.fixed,
    }
    return StepForecast(seconds, bubble, memory, work, by_part)


def _at_once(
    stages: Stages, figures: Figures, devices: int, kinds: str, *, sums: bool, share: float = 1.0
) -> tuple[float, float]:
    """Returns the seconds of a stage's actions while all devices run the same, and their work."""
    number = len(stages.layers)
    costs = action_costs(stages, figures, sums=sums, transfers=False)
    loads = action_loads(stages, figures, costs, sums=sums)
    durations = costs.per_stage(number).durations()
    # Stages are alike, though their measured times differ.
    share *= figures.loop_pace / number
    alone = share * sum(sum(durations[kind]) for kind in kinds)
    done = sum(sum(map(operator.mul, durations[kind], loads[kind])) for kind in kinds)
    work = devices * share * done
    return alone if figures.cores is None else max(alone, work / figures.cores), work


def _program_memory(program: _Program, figures: Figures, place: int) -> float:
    """Returns the maximum bytes of one device at an index along `layers`."""
    loop, ends = program.loop, [program.before, program.behind]
    table = loop.table
    own = [stage for stage, home in enumerate(table.stage_devices) if home == place]
    # The alike layers' weights are stacked, which copies them.
    weights = sum(map(loop.weights, own)) * (2 + loop.cast)
    trained = sum(map(loop.trained, own))
    states = sum(loop.states(stage, figures.optimizer) for stage in own)
    for stages in ends:
        # Without rules for `layers`, copies of the first device's weights have no state.
        weights += stages.weights(0) * (1 + stages.cast)
        trained += stages.trained(0)
        if place == 0 or stages.strides is not None:
            states += stages.states(0, figures.optimizer)
    before, ticking, behind = (StageMemory(each, 0) for each in (ends[0], loop, ends[1]))
    passed = loop.passed(0)
    # The input of each tick, the outputs, and their gradients or those of the inputs.
    held = sum(before.kept) + (program.num_ticks + table.num_microbatches) * passed
    slots = table.num_microbatches * passed
    last = ends[1].trained(0) + sum(behind.kept) + max(behind.working, default=0.0)
    tick = slots + trained + sum(ticking.kept) + max(ticking.working)
    update = trained * (1 + (figures.update_memory - 1) / loop.replicas)
    return weights + states / loop.replicas + max(held + last, held + tick, update)
