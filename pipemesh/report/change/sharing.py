"""How devices that share the cores of a machine slowed each other down in a step that was timed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from pipemesh.schedule import Costs, Timeline

# Loads that are tried, evenly between the least and the most; how often for each kind.
_STEPS, _SWEEPS = 10, 2
# An action keeps one core busy, unless another load explains so much of what actions differ by.
_EXPLAINED = 0.1
# No more of an action that stands out: something else ran then.
_CAP = 0.1
_KINDS = ("F", "B", "I", "W")
Loads = dict[str, float]


def alone(
    measured: Timeline, cores: float | None, home: int, others: Sequence[Timeline] = ()
) -> tuple[Costs, Loads]:
    """What actions would have taken alone, and how many cores one of each kind keeps busy.

    While more cores are wanted than there are, all actions that run go on at the rate
    `cores / wanted`, as in `pipemesh.schedule.simulate`. The more cores an action keeps
    busy, the faster it is while other devices wait: a `B` has products of matrices that need
    nothing of each other. So the loads are those under which actions of a kind and a stage have
    done most nearly as much as each other, however many others ran.

    Args:
        measured: when actions ran.
        cores: that all devices share; None if each has its own.
        home: devices that run each action.
        others: more steps of the same schedule, by which loads are surer.

    Returns:
        Costs, as medians of a stage's actions, and by kind the load of each device, 1 or more.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> step = simulate(gpipe(2, 4), Costs(1, 2), cores=2, loads={"F": 1, "B": 1.5})
        >>> costs, loads = alone(step, 2, 1)
        >>> costs.backward, round(loads["B"], 9)
        ((2.0, 2.0), 1.5)
    """
    ran = dict.fromkeys(span.action.kind for span in measured.spans())
    loads = dict.fromkeys(ran, 1.0)
    if cores is None:
        return measured.costs, loads
    most = max(1.0, cores / home)
    tried = [1 + (most - 1) * step / _STEPS for step in range(_STEPS + 1)]
    steps = (measured, *others)
    first = least = _differing(_works(steps, cores, home, loads))
    for _ in range(_SWEEPS):
        for kind in ran:
            for load in tried:
                other = loads | {kind: load}
                found = _differing(_works(steps, cores, home, other))
                if found < least:
                    loads, least = other, found
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
    """What each action did, in the time that it would have taken alone."""
    found: dict[tuple[str, int], list[float]] = {}
    for step in steps:
        for key, works in _works_of(step, cores, home, loads).items():
            found.setdefault(key, []).extend(works)
    return found


def _works_of(
    measured: Timeline, cores: float, home: int, loads: Mapping[str, float]
) -> dict[tuple[str, int], list[float]]:
    """The same of a step."""
    spans = list(measured.spans())
    changes: dict[float, float] = {0.0: 0.0}
    for span in spans:
        load = home * loads[span.action.kind]
        changes[span.start] = changes.get(span.start, 0.0) + load
        changes[span.end] = changes.get(span.end, 0.0) - load
    times = sorted(changes)
    done, wanted = {times[0]: 0.0}, 0.0
    for before, now in itertools.pairwise(times):
        wanted += changes[before]
        rate = min(1.0, cores / wanted) if wanted > 0 else 1.0
        done[now] = done[before] + rate * (now - before)
    found: dict[tuple[str, int], list[float]] = {}
    for span in spans:
        key = span.action.kind, span.action.stage
        found.setdefault(key, []).append(done[span.end] - done[span.start])
    return found


def _differing(works: dict[tuple[str, int], list[float]]) -> float:
    """By how much actions of a stage differ, in squares of shares."""
    return sum(map(_spread, works.values()))


def _spread(values: Sequence[float]) -> float:
    usual = statistics.median(values)
    return sum(min(_CAP, (v / usual - 1) ** 2) for v in values) if usual else 0.0
