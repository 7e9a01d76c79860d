"""What every device does at every tick, if all act at once and every action takes a tick."""

from __future__ import annotations

from pipemesh.schedule.action import Action
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate

Ticks = tuple[tuple[Action | None, ...], ...]


def lockstep(schedule: Schedule) -> Ticks:
    """Puts the actions of a schedule on one clock.

    Each action is at the first tick at which its device is free and what it consumes was made at
    an earlier one. That is how a loop runs whose turns are ticks, in which every device computes
    something and all hand it on at the end.

    Args:
        schedule: any valid schedule.

    Returns:
        For each device what it does at each tick, None if nothing; all rows are of one length.

    Raises:
        ScheduleError: the schedule is not valid.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> for row in lockstep(gpipe(2, 2)):
        ...     print(" ".join(str(action or "___") for action in row))
        0F0 0F1 ___ ___ 0B1 0B0
        ___ 1F0 1F1 1B1 1B0 ___
    """
    timeline = simulate(schedule, Costs(forward=1, backward=1, input_grad=1, weight_grad=1))
    rows: list[tuple[Action | None, ...]] = []
    for actions, starts in zip(schedule.rows, timeline.starts, strict=True):
        row: list[Action | None] = [None] * round(timeline.makespan)
        for action, start in zip(actions, starts, strict=True):
            row[round(start)] = action
        rows.append(tuple(row))
    return tuple(rows)
