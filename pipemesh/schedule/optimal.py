"""Shortest schedules for small problems, with a proof, by Google's CP-SAT solver.

The solver, OR-tools, is optional: `pip install '.[optimal]'` in a checkout. It runs in a process of
its own, because it crashes in one that has loaded TensorFlow.

Microbatches are alike, so some shortest schedule takes them in order at every stage. In any
schedule let the `k`-th forward of each stage do microbatch `k`, and the same with gradients and
weight gradients. When the `k`-th forward of a stage starts, `k` microbatches have passed the
stage before, so its own `k`-th forward has; likewise for the rest. No time changes, and neither
does what is held, which only depends on how many actions have been done. So the solver only looks
at schedules in order.

As constraints: each pair of a stage `s` and a microbatch `m` has a start of its forward, of its
gradient and of its weight gradient. Where a whole backward is shorter than its two halves, a pair
may choose: then its gradient takes as long as a `B` and there is no `W`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from pipemesh.errors import ScheduleError, install
from pipemesh.schedule.action import Action
from pipemesh.schedule.bounds import lower_bound
from pipemesh.schedule.checks import check_counts, check_number
from pipemesh.schedule.costs import Costs, StageCosts
from pipemesh.schedule.list_schedule import MemoryLimit, limits_of, list_schedule, placements_of
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.validate import validate

# Time beyond that of the search, to start a process and to make the model.
_SPARE_SECONDS = 120.0
_SOLVER = "ortools.sat.python.cp_model"


# Longest duration in ticks of the solver. Durations that are not whole are rounded down.
_TICKS = 100_000_000


@dataclasses.dataclass(frozen=True)
class Optimum:
    """A schedule and the proof of how good it is.

    Attributes:
        schedule: the shortest one that was found.
        makespan: its makespan.
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
        """True if no schedule is shorter, up to a millionth."""
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
        >>> optimum = optimal_schedule(Costs(), 4, 8, memory_limit=2)  # doctest: +SKIP
        >>> optimum.makespan, optimum.is_proved  # doctest: +SKIP
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
    optima = [
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
    best = min(optima, key=lambda optimum: optimum.makespan)
    return dataclasses.replace(best, lower_bound=min(optimum.lower_bound for optimum in optima))


# Costs of links, which may be 0.
_BESIDE = ("transfer", "gradient_sum", "all_gather")


def _check_durations(costs: StageCosts) -> None:
    longest = max(_values(costs))
    for field in dataclasses.fields(costs):
        for stage, value in enumerate(getattr(costs, field.name)):
            if field.name not in _BESIDE and not value * _TICKS >= longest * 2 > 0:
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
    found, bound = solve(ticks, start, limits, seconds, workers)
    # Durations were rounded down, which makes no schedule longer: the bound holds for the costs.
    best = dataclasses.replace(best, lower_bound=max(known, float(bound / scale)))
    if found is not None:
        makespan = simulate(validate(found), costs).makespan
        if makespan < best.makespan:
            best = Optimum(found, makespan, best.lower_bound)
    assert best.lower_bound <= best.makespan * (1 + 1e-9), "the bound is none"
    return dataclasses.replace(best, lower_bound=min(best.lower_bound, best.makespan))


def _values(costs: StageCosts) -> Iterable[float]:
    return itertools.chain(*costs.durations().values(), costs.transfer)


def _written(value: float) -> Fraction:
    """Returns the short decimal that a cost was before round-off, such as 1.9 for 1.3 + 0.6."""
    return Fraction(f"{value:.12g}")


def _ticks_a_unit(costs: StageCosts) -> Fraction:
    """Returns the coarsest clock on which all costs are whole numbers, or else a fine one."""
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


def check_installed() -> None:
    """Raises a `ScheduleError` that says how to get the solver if there is none."""
    try:
        spec = importlib.util.find_spec(_SOLVER)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ScheduleError(
            "optimal_schedule needs OR-tools, which is not installed; use list_schedule, or "
            f"{install('optimal')}"
        )


def solve(
    costs: StageCosts, start: Schedule, limits: tuple[int, ...], seconds: float, workers: int
) -> tuple[Schedule | None, Fraction]:
    """Answers a `Question` in a process of its own, which has loaded OR-tools and no TensorFlow."""
    # Both bring libraries of the same names: a process that has loaded TensorFlow 2.21 and then
    # solves with OR-tools 9.15 ends in a segmentation fault. So the caller loads neither.
    question = {
        "costs": dataclasses.astuple(costs),
        "start": str(start),
        "limits": limits,
        "seconds": seconds,
        "workers": workers,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=seconds + _SPARE_SECONDS,
            # The other process imports what this one can import.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired as error:
        raise ScheduleError(
            f"the exact search was to take {seconds:g} s, and has not ended after "
            f"{error.timeout:g} s; use a smaller problem, or list_schedule"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ScheduleError(
            f"the exact search failed with exit code {done.returncode}"
            + (f": {lines[-1]}" if lines else "")
        )
    answer = json.loads(done.stdout)
    best = answer["best"] and Schedule.from_text(answer["best"])
    return best, Fraction(answer["bound"])


def main() -> None:
    """Solves the question on standard input and prints the answer."""
    question: Any = json.load(sys.stdin)
    costs, start = question["costs"], Schedule.from_text(question["start"])
    solver = importlib.import_module(_SOLVER)
    problem = Question(solver, StageCosts(*map(tuple, costs)), start, question["limits"])
    best, bound = problem.answer(question["seconds"], question["workers"])
    print(json.dumps({"best": best and str(best), "bound": str(bound)}))


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The variables of a stage and a microbatch: starts, and two ends."""

    forward: Any
    grad: Any  # start of its `I`, or of its `B`
    weight: Any
    whole: Any  # whether it does a `B`; None where that never helps
    grad_end: Any  # end of its `I` or `B`
    end: Any  # nothing of it is held from here on


class Question:
    """The search for a shortest schedule as constraints for CP-SAT; costs are in whole ticks."""

    def __init__(
        self,
        solver: Any,
        costs: StageCosts,
        start: Schedule,
        limits: Sequence[int],
    ) -> None:
        self._solver = solver
        self._costs = costs
        self._start = start
        self._placement, self._num_microbatches = start.stage_devices, start.num_microbatches
        self._limits = limits
        self._model = solver.CpModel()
        self._horizon = 0

    def answer(self, seconds: float, workers: int) -> tuple[Schedule | None, Fraction]:
        """Returns the best schedule, None if none was found in time, and a bound in ticks."""
        model = self._model
        ticks = Costs(*dataclasses.astuple(self._costs))
        timeline = simulate(self._start, ticks)
        bound = math.ceil(
            lower_bound(ticks, self._placement, self._num_microbatches, self._limits) - 1e-6
        )
        self._horizon = int(timeline.makespan)
        makespan = model.new_int_var(bound, self._horizon, "makespan")
        pairs = {
            (stage, m): self._pair(stage)
            for stage in range(len(self._placement))
            for m in range(self._num_microbatches)
        }
        for (stage, m), pair in pairs.items():
            model.add(pair.end <= makespan)
            self._follow(pairs, stage, m)
        for device in range(len(self._limits)):
            self._share(device, pairs)
        for span in timeline.spans():
            pair = pairs[span.action.stage, span.action.microbatch]
            kind = span.action.kind
            variable = {"F": pair.forward, "W": pair.weight}.get(kind, pair.grad)
            model.add_hint(variable, int(span.start))
            if pair.whole is not None and kind in "BI":
                model.add_hint(pair.whole, kind == "B")
        model.minimize(makespan)
        run = self._solver.CpSolver()
        run.parameters.max_time_in_seconds = seconds
        run.parameters.num_workers = workers
        status = run.solve(model)
        proved = Fraction(max(bound, math.ceil(run.best_objective_bound - 1e-6)))
        if status in (self._solver.OPTIMAL, self._solver.FEASIBLE):
            return self._schedule(run, pairs), proved
        assert status == self._solver.UNKNOWN, f"{run.status_name(status)}: {model.validate()}"
        return None, Fraction(bound)

    def _pair(self, stage: int) -> _Pair:
        model, costs, horizon = self._model, self._costs, self._horizon
        forward, grad, weight = (model.new_int_var(0, horizon, "") for _ in range(3))
        backward, input_grad = costs.backward[stage], costs.input_grad[stage]
        weight_grad = costs.weight_grad[stage]
        weight_end = weight + weight_grad
        if backward >= input_grad + weight_grad:
            # An I and its W at once do all that a B does, and no later.
            model.add(weight >= grad + input_grad)
            return _Pair(forward, grad, weight, None, grad + input_grad, weight_end)
        whole = model.new_bool_var("")
        grad_end, end = (model.new_int_var(0, horizon, "") for _ in range(2))
        model.add(grad_end == grad + backward).only_enforce_if(whole)
        model.add(grad_end == grad + input_grad).only_enforce_if(~whole)
        model.add(end == grad_end).only_enforce_if(whole)
        model.add(end == weight_end).only_enforce_if(~whole)
        model.add(weight >= grad_end).only_enforce_if(~whole)
        return _Pair(forward, grad, weight, whole, grad_end, end)

    def _follow(self, pairs: dict[tuple[int, int], _Pair], stage: int, m: int) -> None:
        """Makes a pair wait for its neighbours and for the microbatch before."""
        model, costs, pair = self._model, self._costs, pairs[stage, m]
        forward_end = pair.forward + costs.forward[stage]
        if stage + 1 < len(self._placement):
            later = pairs[stage + 1, m]
            near = self._placement[stage] == self._placement[stage + 1]
            lag = 0 if near else int(costs.transfer[stage])
            model.add(later.forward >= forward_end + lag)
            model.add(pair.grad >= later.grad_end + lag)
        else:
            model.add(pair.grad >= forward_end)
        if m + 1 < self._num_microbatches:
            following = pairs[stage, m + 1]
            model.add(following.forward >= forward_end)
            model.add(following.grad >= pair.grad_end)
            if pair.whole is None:
                model.add(following.weight >= pair.end)

    def _share(self, device: int, pairs: dict[tuple[int, int], _Pair]) -> None:
        """Allows a device one action at a time, and no more pairs than its limit."""
        model, costs = self._model, self._costs
        work: list[Any] = []
        held: list[Any] = []
        on_device = [
            (key, pair) for key, pair in pairs.items() if self._placement[key[0]] == device
        ]
        for (stage, _), pair in on_device:
            work.append(model.new_fixed_size_interval_var(pair.forward, costs.forward[stage], ""))
            work.append(self._interval(pair.grad, pair.grad_end))
            split = True if pair.whole is None else ~pair.whole
            work.append(
                model.new_optional_fixed_size_interval_var(
                    pair.weight, costs.weight_grad[stage], split, ""
                )
            )
            held.append(self._interval(pair.forward, pair.end))
        model.add_no_overlap(work)
        if self._limits[device] < len(on_device):
            model.add_cumulative(held, [1] * len(held), self._limits[device])

    def _interval(self, start: Any, end: Any) -> Any:
        size = self._model.new_int_var(0, self._horizon, "")
        return self._model.new_interval_var(start, size, end, "")

    def _schedule(self, run: Any, pairs: dict[tuple[int, int], _Pair]) -> Schedule:
        rows: list[list[tuple[int, Action]]] = [[] for _ in self._limits]
        for (stage, m), pair in pairs.items():
            row = rows[self._placement[stage]]
            whole = pair.whole is not None and run.boolean_value(pair.whole)
            row.append((run.value(pair.forward), Action(stage, "F", m)))
            row.append((run.value(pair.grad), Action(stage, "B" if whole else "I", m)))
            if not whole:
                row.append((run.value(pair.weight), Action(stage, "W", m)))
        in_order = tuple(tuple(action for _, action in sorted(row)) for row in rows)
        return dataclasses.replace(self._start, rows=in_order)
