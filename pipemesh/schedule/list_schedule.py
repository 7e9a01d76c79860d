"""An automatic schedule for given costs and memory: published, repeated, greedy, improved."""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from itertools import islice, product
from typing import cast

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.blocks import even_blocks, repeated
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.checks import check_counts, check_indices, check_number, check_type, short
from pipemesh.schedule.costs import Costs, StageCosts
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.schedule import Schedule, loop, vee
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.timeline import Timeline, peak_of_row
from pipemesh.schedule.validate import validate

MemoryLimit = int | Sequence[int] | None
"""The most (stage, microbatch) pairs that a device may hold: one number or one a device."""


def placements_of(
    costs: Costs,
    num_devices: int,
    num_virtual_stages: int | None,
    stage_devices: Sequence[int] | None,
) -> list[tuple[int, ...]]:
    """Returns the placements that a search tries: a loop, and with two stages a device a V."""
    check_type("costs", costs, Costs)
    if stage_devices is not None:
        devices = check_indices("stage_devices", stage_devices)
        if sorted(set(devices)) != list(range(num_devices)):
            raise ScheduleError(
                f"stage_devices is {devices}; every device from 0 to {num_devices - 1} "
                "must have a stage, and no other"
            )
        return [devices]
    if num_virtual_stages is None:
        num_stages = costs.num_stages or num_devices
        if num_stages % num_devices:
            raise ScheduleError(
                f"the costs are for {num_stages} stages, which is not a multiple of "
                f"{num_devices} devices; give stage_devices"
            )
        num_virtual_stages = num_stages // num_devices
    (num_virtual_stages,) = check_counts(num_virtual_stages=num_virtual_stages)
    placements = [loop(num_devices, num_virtual_stages)]
    if num_virtual_stages == 2 and num_devices > 1:
        placements.append(vee(num_devices))
    return placements


def limits_of(
    memory_limit: MemoryLimit,
    stage_devices: Sequence[int],
    num_devices: int,
    num_microbatches: int,
) -> tuple[int, ...]:
    """Returns for each device the number of (stage, microbatch) pairs it may hold."""
    stages = [list(stage_devices).count(device) for device in range(num_devices)]
    if memory_limit is None:
        return tuple(count * num_microbatches for count in stages)
    if hasattr(memory_limit, "__len__"):
        limits = check_indices("memory_limit", memory_limit, num_devices)
    else:
        try:
            limits = (operator.index(cast(int, memory_limit)),) * num_devices
        except TypeError:
            raise ScheduleError(
                f"memory_limit is {short(memory_limit)}; give an integer or one a device"
            ) from None
    for device, (limit, count) in enumerate(zip(limits, stages, strict=True)):
        if limit < count:
            raise ScheduleError(
                f"memory_limit of device {device} is {limit}, but it has {count} stages and must "
                f"hold one microbatch of each; it must be at least {count}"
            )
    return limits


@dataclasses.dataclass(frozen=True)
class Policy:
    """The rule by which a free device chooses its next action."""

    # If an `F` and an `I` are ready: `F`, `I`, or `alternate` for the kind not done last.
    prefer: str
    deep_first: bool  # Prefer the later stage for `F`.
    # Rather wait than start a `W` that would still run when an `F` or `I` arrives that is already
    # on its way.
    patient: bool
    cap: tuple[int, ...]  # For each device the most (stage, microbatch) pairs it may hold.


class Greedy:
    """Devices that choose by a policy; they know nothing of the future but results on their way."""

    # A forward is admitted only if the device keeps one place free for each later stage of its own,
    # so that the oldest microbatch can always get through.

    def __init__(
        self,
        costs: StageCosts,
        stage_devices: Sequence[int],
        num_microbatches: int,
        policy: Policy,
    ) -> None:
        self._durations, self._transfer = costs.durations(), costs.transfer
        self._homes = stage_devices
        self._policy = policy
        self._num_microbatches = num_microbatches
        num_stages, num_devices = len(stage_devices), max(stage_devices) + 1
        self._stages = [
            [s for s in range(num_stages) if stage_devices[s] == d] for d in range(num_devices)
        ]
        self._room_for_later = {
            s: len(stages) - 1 - index for stages in self._stages for index, s in enumerate(stages)
        }
        # Microbatches pass every stage in order, so counters say what has been done.
        self._done = {kind: [0] * num_stages for kind in "FIW"}
        # When the input of microbatch m arrives at a stage, for those that are on their way.
        self._inputs: list[list[float]] = [[] for _ in range(num_stages)]
        self._grads: list[list[float]] = [[] for _ in range(num_stages)]
        self._inputs[0] = [0.0] * num_microbatches
        self._held = [0] * num_devices
        self._free = [0.0] * num_devices
        self._rows: list[list[Action]] = [[] for _ in range(num_devices)]
        self._events = [(0.0, device) for device in range(num_devices)]

    def rows(self) -> list[list[Action]] | None:
        """Lets every device choose until all is done; returns None if the rule got stuck."""
        while self._events:
            now, device = heapq.heappop(self._events)
            if now >= self._free[device]:
                self._decide(device, now)
        done = sum(map(sum, self._done.values()))
        return self._rows if done == 3 * len(self._homes) * self._num_microbatches else None

    def _decide(self, device: int, now: float) -> None:
        ready: list[tuple[str, int]] = []
        next_arrival = math.inf
        for stage in self._stages[device]:
            for kind in "FI":
                arrival = self._arrival(kind, stage)
                if arrival <= now:
                    ready.append((kind, stage))
                else:
                    next_arrival = min(next_arrival, arrival)
        if ready:
            self._do(device, now, *min(ready, key=lambda choice: self._rank(device, choice)))
            return
        done = self._done["W"]
        owed = [s for s in self._stages[device] if done[s] < self._done["I"][s]]
        if owed:
            stage = min(owed, key=lambda s: (done[s], -s))
            full = self._held[device] >= self._policy.cap[device]
            ends = now + self._durations["W"][stage]
            if full or not self._policy.patient or ends <= next_arrival:
                self._do(device, now, "W", stage)
                return
        # An arrival that is known but not yet here wakes the device: its event is in the heap.

    def _rank(self, device: int, choice: tuple[str, int]) -> tuple[int, int]:
        kind, stage = choice
        prefer = self._policy.prefer
        if prefer == "alternate":
            last = next((a.kind for a in reversed(self._rows[device]) if a.kind != "W"), "I")
            prefer = "I" if last == "F" else "F"
        if kind == "F":
            order = -stage if self._policy.deep_first else stage
        else:
            order = self._done["I"][stage]
        return (0 if kind == prefer else 1, order)

    def _arrival(self, kind: str, stage: int) -> float:
        """Returns when the next `F` or `I` of a stage may start; infinite if not known yet."""
        arrivals = (self._inputs if kind == "F" else self._grads)[stage]
        microbatch, device = self._done[kind][stage], self._homes[stage]
        room = self._policy.cap[device] - self._room_for_later[stage]
        is_full = kind == "F" and self._held[device] >= room
        return math.inf if microbatch >= len(arrivals) or is_full else arrivals[microbatch]

    def _do(self, device: int, now: float, kind: str, stage: int) -> None:
        self._rows[device].append(Action(stage, kind, self._done[kind][stage]))
        self._done[kind][stage] += 1
        self._held[device] += {"F": 1, "I": 0, "W": -1}[kind]
        end = now + self._durations[kind][stage]
        self._free[device] = end
        heapq.heappush(self._events, (end, device))
        if kind == "F" and stage < len(self._homes) - 1:
            self._deliver(self._inputs, stage, stage + 1, end)
        elif kind == "F":
            self._grads[stage].append(end)
        elif kind == "I" and stage:
            self._deliver(self._grads, stage, stage - 1, end)

    def _deliver(self, boxes: list[list[float]], source: int, target: int, end: float) -> None:
        if self._homes[source] != self._homes[target]:
            end += self._transfer[min(source, target)]
        boxes[target].append(end)
        heapq.heappush(self._events, (end, self._homes[target]))


# How many actions the search may walk over in greedy runs, and again in small changes.
_BUDGET = 1_000_000
_FEWEST_RUNS = 8
_MOST_BLOCKS = 24


def list_schedule(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    memory_limit: MemoryLimit = None,
    num_virtual_stages: int | None = None,
    *,
    stage_devices: Sequence[int] | None = None,
    effort: int = 300,
) -> Schedule:
    """Searches a short schedule within a memory limit.

    Three steps. First, candidates: every schedule of this package with as many stages a device
    that keeps within the limit; with one or two stages a device the even blocks that fit, repeated
    (`pipemesh.schedule.blocks`); and greedy runs in which each free device takes the best ready
    action by one of several rules (backwards or forwards first or in turn, later or earlier stage
    first, weight gradients at once or only where they delay nothing, several caps on what is held).
    With two stages a device all that both on a loop and on a V. Second, the shortest one wins;
    ties go to the one that holds less. Third, small changes along its critical path, as long as
    they help.

    The result is therefore never longer than any published schedule on the same stages that fits
    into the memory. `Timeline.above_bound` says how far it can be from the optimum: with equal
    costs, 8 devices, 32 microbatches and 1F1B's memory it is the optimum, on one stage a device,
    on a loop of two and on a V. `optimal_schedule` closes the gap for small problems. The
    search is deterministic. The larger the table, the fewer rules and changes it tries: about a
    second for 3,000 actions, some twenty for 50,000.

    Args:
        costs: durations and transfer times; with one value a stage they also say how many
            stages there are.
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        memory_limit: the most (stage, microbatch) pairs that a device may hold, in the sense of
            `Timeline.peak_activations`: one number or one a device, at least the number of the
            device's stages. None for no limit.
        num_virtual_stages: stages a device; by default what `costs` say, else 1.
        stage_devices: for each stage its device, to fix the placement.
        effort: largest number of small changes to try, 0 for none.

    Returns:
        A validated schedule.

    Raises:
        ScheduleError: a count is below 1, the costs do not fit the stages, or a limit is below
            the number of stages of its device.

    Example:
        >>> from pipemesh.schedule import Costs, list_schedule, one_f_one_b, simulate
        >>> slow_end = Costs(forward=[1, 1, 1, 2])
        >>> searched = list_schedule(slow_end, num_devices=4, num_microbatches=8, memory_limit=4)
        >>> simulate(searched, slow_end).makespan < simulate(one_f_one_b(4, 8), slow_end).makespan
        True
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    placements = placements_of(costs, num_devices, num_virtual_stages, stage_devices)
    num_stages = len(placements[0])
    costs.per_stage(num_stages)  # Fails early, naming the cost that does not fit.
    limits = limits_of(memory_limit, placements[0], num_devices, num_microbatches)
    best: Timeline | None = None
    for schedule in _candidates(costs, placements, num_microbatches, limits):
        if any(peak_of_row(row) > limit for row, limit in zip(schedule.rows, limits, strict=True)):
            continue
        timeline = simulate(schedule, costs)
        if best is None or _score(timeline) < _score(best):
            best = timeline
    assert best is not None, "one microbatch at a time always fits"
    trials = min(int(check_number("effort", effort)), _BUDGET // sum(map(len, best.schedule.rows)))
    return validate(improved(best, limits, trials).schedule)


def _score(timeline: Timeline) -> tuple[float, int]:
    # Round-off must not decide between equally long schedules.
    return (round(timeline.makespan, 9), sum(timeline.peak_activations))


def _candidates(
    costs: Costs,
    placements: Sequence[tuple[int, ...]],
    num_microbatches: int,
    limits: tuple[int, ...],
) -> Iterator[Schedule]:
    num_devices = len(limits)
    num_stages = len(placements[0])
    yield _one_at_a_time(placements[0], num_devices, num_microbatches)
    virtual_stages = num_stages // num_devices
    for name in BUILDERS:
        known = NAMES[name]
        if not known.trains or not (known.is_open or known.stages_a_device == virtual_stages):
            continue
        try:
            schedule = build(name, num_devices, num_microbatches, virtual_stages)
        except ScheduleError:
            continue  # This schedule demands another number of microbatches.
        if schedule.stage_devices in placements:
            yield schedule
    blocks = min(_MOST_BLOCKS, _BUDGET // (10 * num_stages * num_microbatches))
    for placement in placements if blocks else ():
        for period, offsets in even_blocks(placement, num_devices, limits, blocks):
            yield from repeated(placement, offsets, period, num_microbatches, limits)
    stage_costs = costs.per_stage(num_stages)
    runs = max(_FEWEST_RUNS, _BUDGET // (3 * num_stages * num_microbatches))
    policies = zip(*(_policies(limits, placement) for placement in placements), strict=True)
    chosen = ((p, placements[i]) for row in policies for i, p in enumerate(row))
    for policy, placement in islice(chosen, runs):
        rows = Greedy(stage_costs, placement, num_microbatches, policy).rows()
        if rows is not None:
            yield Schedule(tuple(map(tuple, rows)), placement, num_microbatches)


def _policies(limits: tuple[int, ...], placement: tuple[int, ...]) -> Iterator[Policy]:
    num_devices = len(limits)
    most = range(num_devices)
    share = len(placement) // num_devices
    least = [placement.count(device) for device in most]
    wishes = [
        limits,
        tuple(share * num_devices for _ in most),
        tuple(share * (num_devices - d) for d in most),
        tuple(2 * share * num_devices for _ in most),
        tuple((share + 1) * num_devices for _ in most),
    ]
    caps = dict.fromkeys(
        tuple(max(min(cap), floor) for *cap, floor in zip(row, limits, least, strict=True))
        for row in wishes
    )
    deep = (True, False) if share > 1 else (True,)
    # The most different rules first, for a search that may not try them all.
    for patient, deep_first, prefer, cap in product(
        (True, False), deep, ("I", "alternate", "F"), caps
    ):
        yield Policy(prefer, deep_first, patient, cap)


def _one_at_a_time(
    stage_devices: tuple[int, ...], num_devices: int, num_microbatches: int
) -> Schedule:
    """Returns the schedule without any pipelining, which fits if one microbatch fits."""
    rows: list[list[Action]] = [[] for _ in range(num_devices)]
    stages = range(len(stage_devices))
    for m, (kind, order) in product(range(num_microbatches), (("F", stages), ("B", stages[::-1]))):
        for stage in order:
            rows[stage_devices[stage]].append(Action(stage, kind, m))
    return Schedule(tuple(map(tuple, rows)), stage_devices, num_microbatches)


# Moves of recomputations; each costs a simulation.
_MAX_TRIALS = 2000


def _changes(timeline: Timeline) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Yields changed rows that may shorten the critical path: no change elsewhere can."""
    # A `B` is split, a `W` moves behind the next few actions, or two neighbours change places.
    for span in timeline.critical_path:
        device, tick, action = span.device, span.tick, span.action
        row = timeline.schedule.rows[device]
        if action.kind == "B":
            split = (action.also("I"), action.also("W"))
            yield device, (*row[:tick], *split, *row[tick + 1 :])
        if action.kind == "W":
            for reach in (1, 2, 4, len(row)):
                after = row[tick + 1 :]
                yield device, (*row[:tick], *after[:reach], action, *after[reach:])
        elif tick and not _depends(action, row[tick - 1]):
            yield device, (*row[: tick - 1], action, row[tick - 1], *row[tick + 1 :])


def _depends(later: Action, earlier: Action) -> bool:
    same = later.also("F") == earlier.also("F")
    return same or (later.kind == earlier.kind and later.stage == earlier.stage)


def improved(
    best: Timeline,
    limits: Sequence[int],
    max_trials: int,
    changes: Callable[[Timeline], Iterator[tuple[int, tuple[Action, ...]]]] = _changes,
) -> Timeline:
    """Takes the first of `changes` (device, row) that shortens the step, and repeats."""
    trials = 0
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for device, row in changes(best):
            if trials >= max_trials:
                return best
            if peak_of_row(row) > limits[device]:
                continue
            trials += 1
            rows = (*best.schedule.rows[:device], row, *best.schedule.rows[device + 1 :])
            try:
                timeline = simulate(dataclasses.replace(best.schedule, rows=rows), best.costs)
            except ScheduleError:
                continue  # Out of order or a deadlock.
            if _climbing_score(timeline) < _climbing_score(best):
                best = timeline
                is_shorter = True
                break
    return best


def _climbing_score(timeline: Timeline) -> tuple[float, float]:
    # The second number lets changes that only help together be found one by one.
    return (timeline.makespan, sum(row[-1] for row in timeline.ends if row))


def recompute(
    schedule: Schedule,
    stages: Collection[int] | None = None,
    costs: Costs | None = None,
    memory_limits: Sequence[int] | None = None,
) -> Schedule:
    """Gives stages an `R` before each backward, so that they hold less in between.

    An `R` needs nothing from other devices, so one right before its backward fills the time in
    which the device waits for the gradient. With memory to spare it also moves to earlier idle
    time, as long as that makes the step shorter. Where the backward follows its forward at once
    nothing is recomputed, as nothing would be saved.

    Source: the idea that recomputation be scheduled into bubbles is that of Liu et al., "Mario:
    Near Zero-cost Activation Checkpointing in Pipeline Parallelism", PPoPP 2025.

    Args:
        schedule: any valid schedule with backward actions and without `R`.
        stages: the stages that recompute; None for all.
        costs: durations per stage, for moving `R` to idle time; by default `Costs()`.
        memory_limits: for each device how many pairs it may hold, in the sense of
            `Timeline.peak_activations`; by default no more than with every `R` right before its
            backward.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: the schedule is not valid, is forward-only or has an `R` already, a stage
            does not exist, or the limits are too few, too many, or less than is held in any
            case.

    Example:
        >>> from pipemesh.schedule import one_f_one_b
        >>> print(recompute(one_f_one_b(2, 3)))
        0: 0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2
        1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    validate(schedule)
    if schedule.is_forward_only:
        raise ScheduleError("the schedule has no backward actions; there is nothing to recompute")
    if schedule.recomputed():
        raise ScheduleError("the schedule has recomputations already; give it without any R")
    chosen = set(range(schedule.num_stages))
    if stages is not None:
        listed = list(stages) if isinstance(stages, Set) else stages
        chosen = set(check_indices("stages", listed))
    for stage in sorted(chosen):
        if not 0 <= stage < schedule.num_stages:
            raise ScheduleError(
                f"stages has {stage}, but stages are from 0 to {schedule.num_stages - 1}"
            )
    rows = tuple(tuple(_with_recomputation(row, chosen)) for row in schedule.rows)
    late = simulate(dataclasses.replace(schedule, rows=rows), costs)
    least = late.peak_activations
    limits = least
    if memory_limits is not None:
        limits = check_indices("memory_limits", memory_limits, len(least))
    for device, (limit, need) in enumerate(zip(limits, least, strict=True)):
        if limit < need:
            raise ScheduleError(
                f"memory_limits[{device}] is {limit}, but device {device} holds {need} even with "
                "every recomputation right before its backward"
            )
    return validate(improved(late, limits, _MAX_TRIALS, _moves).schedule)


def _with_recomputation(row: Sequence[Action], stages: Collection[int]) -> Iterator[Action]:
    for before, action in zip((None, *row), row, strict=False):
        if action.kind in "BI" and action.stage in stages and before != action.also("F"):
            yield action.also("R")
        yield action


def _moves(timeline: Timeline) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Yields rows with one `R` on the critical path moved into idle time before it."""
    for span in timeline.critical_path:
        if span.action.kind != "R":
            continue
        device, action = span.device, span.action
        row = timeline.schedule.rows[device]
        starts, ends = timeline.starts[device], timeline.ends[device]
        for tick in range(span.tick - 1, row.index(action.also("F")), -1):
            if starts[tick] > ends[tick - 1]:
                between = row[tick : span.tick]
                yield device, (*row[:tick], action, *between, *row[span.tick + 1 :])
