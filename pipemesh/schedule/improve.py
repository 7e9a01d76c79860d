"""Small changes along the critical path that make a step shorter, with and without `R`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence, Set

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.checks import check_indices
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.timeline import Timeline, peak_of_row
from pipemesh.schedule.validate import validate

# Moves of recomputations; each costs a simulation.
_MAX_TRIALS = 2000


def improve(schedule: Schedule, costs: Costs, limits: Sequence[int], max_trials: int) -> Schedule:
    """Takes the first small change that makes the step shorter, and repeats.

    Only actions on the critical path are touched, because no other change can shorten the step:
    two neighbours in a row change places, a `W` moves behind the next few actions of its row, and
    a `B` is split into `I` and `W`. The result holds no more than `limits` on any device.
    """
    return _climbed(simulate(schedule, costs), limits, _changes, max_trials).schedule


def _climbed(
    best: Timeline,
    limits: Sequence[int],
    changes: Callable[[Timeline], Iterator[tuple[int, tuple[Action, ...]]]],
    max_trials: int,
) -> Timeline:
    """Takes the first of `changes` that shortens the step, and repeats.

    At most `max_trials` of them, each a device with a changed row, are simulated.
    """
    trials = 0
    improved = True
    while improved:
        improved = False
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
            if _score(timeline) < _score(best):
                best = timeline
                improved = True
                break
    return best


def _score(timeline: Timeline) -> tuple[float, float]:
    # The second number lets changes that only help together be found one by one.
    return (timeline.makespan, sum(row[-1] for row in timeline.ends if row))


def _changes(timeline: Timeline) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Yields changed rows that may shorten the critical path."""
    for span in timeline.critical_path:
        device, tick, action = span.device, span.tick, span.action
        row = timeline.schedule.rows[device]
        if action.kind == "B":
            split = (action.also("I"), action.also("W"))
            yield device, (*row[:tick], *split, *row[tick + 1 :])
        if action.kind == "W":
            for reach in (1, 2, 4, len(row)):
                yield (
                    device,
                    (
                        *row[:tick],
                        *row[tick + 1 : tick + 1 + reach],
                        action,
                        *row[tick + 1 + reach :],
                    ),
                )
        elif tick and not _depends(action, row[tick - 1]):
            yield device, (*row[: tick - 1], action, row[tick - 1], *row[tick + 1 :])


def _depends(later: Action, earlier: Action) -> bool:
    same = later.also("F") == earlier.also("F")
    return same or (later.kind == earlier.kind and later.stage == earlier.stage)


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
    return validate(_climbed(late, limits, _moves, _MAX_TRIALS).schedule)


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
                yield (
                    device,
                    (*row[:tick], action, *row[tick : span.tick], *row[span.tick + 1 :]),
                )
