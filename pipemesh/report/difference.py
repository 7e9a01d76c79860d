"""Splits the time of a measured step: the simulated schedule, and what came on top."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from pipemesh.schedule import Costs, Schedule, Timeline, simulate
from pipemesh.schedule.simulate import run_table
from pipemesh.schedule.table import NOTHING, Table, compile_table

_KINDS = ("forward", "backward", "input_grad", "weight_grad")


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
    found = costs.per_stage(schedule.num_stages)
    equal = Costs(*(statistics.fmean(getattr(found, name)) for name in _KINDS))
    predicted = simulate(schedule, costs)
    table = compile_table(schedule)
    durations = [
        [end - start for start, end in zip(*row, strict=True)]
        for row in zip(measured.starts, measured.ends, strict=True)
    ]
    delays, is_own = _delays(table, measured)
    late = [[max(0.0, delay) for delay in row] for row in delays]
    own = [
        [delay if mine else 0.0 for delay, mine in zip(row, theirs, strict=True)]
        for row, theirs in zip(late, is_own, strict=True)
    ]
    nothing = [[0.0] * len(row) for row in durations]
    makespans = [
        sum(predicted.busy) / schedule.num_devices,
        simulate(schedule, equal).makespan,
        predicted.makespan,
        _replay(schedule, table, durations, nothing),
        _replay(schedule, table, durations, own),
        _replay(schedule, table, durations, late),
        _replay(schedule, table, durations, delays),
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
    """Mean waits that the schedule does not explain, in the unit of the timeline.

    Attributes:
        own: before an action, although its device was free and all inputs were available.
        sent: from the end of an action until another device that waited for it used its result; 0
            if no device waited.
    """

    own: float
    sent: float


def waits_of(measured: Timeline) -> Waits:
    """Returns the waits of a measured step that its schedule does not explain.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> waits_of(simulate(gpipe(2, 2), Costs(1, 2, transfer=0.5)))
        Waits(own=0.0, sent=0.5)
    """
    delays, is_own = _delays(compile_table(measured.schedule), measured)
    own: list[float] = []
    sent: list[float] = []
    for row, theirs in zip(delays, is_own, strict=True):
        for delay, mine in zip(row, theirs, strict=True):
            own.append(delay if mine else 0.0)
            if not mine:
                sent.append(delay)
    # An action begins with its first result's arrival, and may so begin before another has ended.
    late = statistics.fmean(sent) if sent else 0.0
    return Waits(max(0.0, statistics.fmean(own)), max(0.0, late))


def _delays(table: Table, measured: Timeline) -> tuple[list[list[float]], list[list[bool]]]:
    """How long each action waited for nothing that the table knows, and if its device did so."""
    end = [0.0] * table.num_codes
    for codes, ends in zip(table.codes, measured.ends, strict=True):
        for code, time in zip(codes, ends, strict=True):
            end[code] = time
    delays: list[list[float]] = []
    is_own: list[list[bool]] = []
    for device, starts in enumerate(measured.starts):
        delays.append([])
        is_own.append([])
        before = 0.0
        for tick, start in enumerate(starts):
            source = table.waits[device][tick]
            arrived = end[source] if source != NOTHING else 0.0
            delay = start - max(before, arrived)
            delays[-1].append(delay)
            is_own[-1].append(arrived <= before or not table.remote[device][tick])
            before = measured.ends[device][tick]
    return delays, is_own


def _replay(
    schedule: Schedule,
    table: Table,
    durations: Sequence[Sequence[float]],
    delays: Sequence[Sequence[float]],
) -> float:
    """Returns the makespan of a table whose actions take these durations and wait these delays."""
    _, ends = run_table(schedule, table, durations, delays=delays)
    return max(row[-1] for row in ends if row)
