"""Makes a schedule a little better by small changes along its critical path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.timeline import Timeline, peak_of_row


def improve(schedule: Schedule, costs: Costs, limits: Sequence[int], max_trials: int) -> Schedule:
    """Hill climbing: takes the first small change that makes the step shorter, and repeats.

    Only actions on the critical path are touched, because no other change can shorten the step:
    two neighbours in a row change places, a `W` moves behind the next few actions of its row, and
    a `B` is split into `I` and `W`.

    Args:
        schedule: a valid schedule within the limits.
        costs: durations.
        limits: for each device the most (stage, microbatch) pairs it may hold.
        max_trials: how many changes are tried at most; each costs one simulation.

    Returns:
        A valid schedule within the limits, at least as short.
    """
    best = simulate(schedule, costs)
    trials = 0
    improved = True
    while improved:
        improved = False
        for device, row in _changes(best):
            if trials == max_trials:
                return best.schedule
            if peak_of_row(row) > limits[device]:
                continue
            trials += 1
            rows = (*best.schedule.rows[:device], row, *best.schedule.rows[device + 1 :])
            try:
                timeline = simulate(dataclasses.replace(best.schedule, rows=rows), costs)
            except ScheduleError:
                continue  # Out of order or a deadlock.
            if _score(timeline) < _score(best):
                best = timeline
                improved = True
                break
    return best.schedule


def _score(timeline: Timeline) -> tuple[float, float]:
    # The second number lets two changes that only help together be found one by one.
    return (timeline.makespan, sum(row[-1] for row in timeline.ends if row))


def _changes(timeline: Timeline) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Changed rows that may shorten the critical path."""
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
