"""How devices that share the cores of a machine slowed each other down in a step that was timed."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence

from pipemesh.schedule import Costs, Timeline

# Loads that are tried, in steps of this much of what there is between the least and the most.
_STEPS = 20
# One action keeps one core busy, unless another load explains so much of what actions of a stage
# differ by.
_EXPLAINED = 0.2
_KINDS = ("F", "B", "I", "W")


def alone(measured: Timeline, cores: float | None, home: int) -> tuple[Costs, float]:
    """What actions would have taken alone, and the cores that one keeps busy on each device.

    While more cores are wanted than there are, all actions that run go on at the rate
    `cores / wanted`, as in `pipemesh.schedule.simulate_sharing`. The more cores one action keeps
    busy, the faster it is while other devices wait; so the load is the one under which actions of a
    kind and a stage have done most nearly as much as each other, however many others ran.

    Args:
        measured: when actions ran.
        cores: that all devices share; None if each has its own.
        home: devices that run each action.

    Returns:
        Costs, as medians of a stage's actions, and the load, 1 or more.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate_sharing
        >>> step = simulate_sharing(gpipe(2, 4), Costs(1, 2), cores=2, loads=1.5)
        >>> costs, load = alone(step, 2, 1)
        >>> costs.forward, round(load, 9)
        ((1.0, 1.0), 1.5)
    """
    if cores is None:
        return measured.costs, 1.0
    most = max(1.0, cores / home)
    loads = [1 + (most - 1) * step / _STEPS for step in range(_STEPS + 1)]
    differing = [_differing(_works(measured, cores, home * load)) for load in loads]
    best = min(range(len(loads)), key=differing.__getitem__)
    if differing[best] > (1 - _EXPLAINED) * differing[0]:
        best = 0
    works = _works(measured, cores, home * loads[best])
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
    return Costs(*fields), loads[best]


def _works(measured: Timeline, cores: float, load: float) -> dict[tuple[str, int], list[float]]:
    """What each action did, in the time that it would have taken alone."""
    times = sorted({0.0, *itertools.chain(*measured.starts, *measured.ends)})
    starts, ends = (sorted(itertools.chain(*rows)) for rows in (measured.starts, measured.ends))
    done = [0.0]
    for before, now in itertools.pairwise(times):
        running = bisect.bisect_right(starts, before) - bisect.bisect_right(ends, before)
        rate = min(1.0, cores / (running * load)) if running > 0 else 1.0
        done.append(done[-1] + rate * (now - before))
    until = dict(zip(times, done, strict=True))
    found: dict[tuple[str, int], list[float]] = {}
    for span in measured.spans():
        key = span.action.kind, span.action.stage
        found.setdefault(key, []).append(until[span.end] - until[span.start])
    return found


def _differing(works: dict[tuple[str, int], list[float]]) -> float:
    """By how much actions of a stage differ, in squares of shares."""
    return sum(map(_spread, works.values()))


def _spread(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value / mean - 1) ** 2 for value in values) if mean else 0.0
