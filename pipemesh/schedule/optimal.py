"""Shortest schedules for small problems, with a proof, by Google's CP-SAT solver.

The solver, OR-tools, is optional: `pip install '.[optimal]'` in a checkout. It runs in a process of
its own, as it does not go with a TensorFlow that is loaded.

Microbatches are alike, so some shortest schedule takes them in order at every stage. In any
schedule let the `k`-th forward of each stage do microbatch `k`, and the same with gradients and
weight gradients. When the `k`-th forward of a stage starts, `k` microbatches have passed the
stage before, so its own `k`-th forward has; likewise for the rest. No time changes, and neither
does what is held, which only depends on how many actions have been done. So the solver only looks
at schedules in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from pipemesh.errors import ScheduleError
from pipemesh.schedule.bounds import lower_bound
from pipemesh.schedule.checks import check_counts, check_number
from pipemesh.schedule.costs import Costs, StageCosts
from pipemesh.schedule.exact_process import answer, check_installed
from pipemesh.schedule.list_schedule import list_schedule
from pipemesh.schedule.problem import MemoryLimit, limits_of, placements_of
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.validate import validate

# Longest duration in ticks of the solver. What does not come out even is rounded down.
_TICKS = 100_000_000


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A schedule and how much is proved about it.

    Attributes:
        schedule: the shortest one that was found.
        makespan: how long it takes.
        lower_bound: no schedule within the same limits takes less.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> Optimum(gpipe(1, 1), makespan=3.0, lower_bound=3.0).is_proved
        True
    """

    schedule: Schedule
    makespan: float
    lower_bound: float

    @property
    def is_proved(self) -> bool:
        """Whether no schedule is shorter, up to a millionth."""
        return self.makespan <= self.lower_bound * (1 + 1e-6)


def optimal_schedule(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    memory_limit: MemoryLimit = None,
    num_virtual_stages: int | None = None,
    *,
    stage_devices: Sequence[int] | None = None,
    time_limit: float = 60.0,
    workers: int = 8,
) -> Optimum:
    """Searches the shortest schedule within a memory limit and proves that it is.

    Meant for problems of up to some sixty actions a device, which take from a moment to minutes;
    larger ones give the best schedule that was found in the time, and a bound. The search starts
    from `list_schedule` and never returns anything longer. With several workers it may
    return another schedule of the same length each time.

    Args:
        costs: as for `list_schedule`. Durations are above 0.
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        memory_limit: the most (stage, microbatch) pairs that a device may hold: one number or one
            a device. None for no limit.
        num_virtual_stages: stages a device; by default what `costs` say, else 1. With 2, both on a
            loop and on a V.
        stage_devices: for each stage its device, to fix the placement.
        time_limit: seconds, over all placements.
        workers: how many threads search, each in its own way.

    Returns:
        The schedule and the bound.

    Raises:
        ScheduleError: see `list_schedule`; also if a duration is 0, or OR-tools is not installed.

    Example:
        >>> found = optimal_schedule(Costs(), 4, 8, memory_limit=2)  # doctest: +SKIP
        >>> found.makespan, found.is_proved  # doctest: +SKIP
        (41.0, True)
    """
    num_devices, num_microbatches, workers = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, workers=workers
    )
    time_limit = check_number("time_limit", time_limit, above=True)
    placements = placements_of(costs, num_devices, num_virtual_stages, stage_devices)
    limits = limits_of(memory_limit, placements[0], num_devices, num_microbatches)
    _check_durations(costs.per_stage(len(placements[0])))
    check_installed()
    found = [
        _on_placement(
            costs,
            placement,
            num_microbatches,
            limits,
            time_limit / len(placements),
            workers,
        )
        for placement in placements
    ]
    best = min(found, key=lambda optimum: optimum.makespan)
    return dataclasses.replace(best, lower_bound=min(optimum.lower_bound for optimum in found))


def _check_durations(costs: StageCosts) -> None:
    longest = max(_values(costs))
    for field in dataclasses.fields(costs):
        for stage, value in enumerate(getattr(costs, field.name)):
            if field.name != "transfer" and not value * _TICKS >= longest * 2 > 0:
                raise ScheduleError(
                    f"cost {field.name} of stage {stage} is {value}; optimal_schedule needs "
                    f"durations above 0, at least {longest * 2 / _TICKS:.2g} here"
                )


def _on_placement(
    costs: Costs,
    placement: tuple[int, ...],
    num_microbatches: int,
    limits: tuple[int, ...],
    seconds: float,
    workers: int,
) -> Optimum:
    start = list_schedule(
        costs, len(limits), num_microbatches, limits, stage_devices=placement, effort=50
    )
    known = lower_bound(costs, placement, num_microbatches, limits)
    best = Optimum(start, simulate(start, costs).makespan, known)
    if best.is_proved:
        return best
    scale = _ticks_a_unit(costs.per_stage(len(placement)))
    ticks = _in_ticks(costs, scale, len(placement))
    rows, bound = answer(ticks, start, limits, seconds, workers)
    # Durations were rounded down, which makes no schedule longer: the bound holds for the costs.
    best = dataclasses.replace(best, lower_bound=max(known, float(bound / scale)))
    if rows is not None:
        schedule = validate(Schedule(rows, placement, num_microbatches))
        makespan = simulate(schedule, costs).makespan
        if makespan < best.makespan:
            best = Optimum(schedule, makespan, best.lower_bound)
    assert best.lower_bound <= best.makespan * (1 + 1e-9), "the bound is none"
    return dataclasses.replace(best, lower_bound=min(best.lower_bound, best.makespan))


def _values(costs: StageCosts) -> Iterable[float]:
    return (value for field in dataclasses.astuple(costs) for value in field)


def _written(value: float) -> Fraction:
    """The short decimal that a cost was before round-off, such as 1.3 + 0.6, or what it is."""
    return Fraction(f"{value:.12g}")


def _ticks_a_unit(costs: StageCosts) -> Fraction:
    """The coarsest clock on which all costs, as they are written, are whole; or else a fine one."""
    written = [_written(value) for value in _values(costs)]
    whole = math.lcm(*(value.denominator for value in written))
    scale = Fraction(whole, math.gcd(*(int(value * whole) for value in written)))
    longest = max(written)
    return scale if longest * scale <= _TICKS else Fraction(_TICKS) / longest


def _in_ticks(costs: Costs, scale: Fraction, num_stages: int) -> StageCosts:
    return StageCosts(
        *(
            tuple(math.floor(_written(value) * scale) for value in values)
            for values in dataclasses.astuple(costs.per_stage(num_stages))
        )
    )
