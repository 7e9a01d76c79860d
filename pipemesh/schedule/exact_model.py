"""The search for a shortest schedule as constraints for CP-SAT; see `pipemesh.schedule.optimal`.

Each pair of a stage `s` and a microbatch `m` has a start of its forward, of its gradient and of
its weight gradient. Where a whole backward is shorter than its two halves, a pair may choose:
then its gradient takes as long as a `B` and there is no `W`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from pipemesh.schedule.action import Action
from pipemesh.schedule.bounds import lower_bound
from pipemesh.schedule.costs import Costs, StageCosts
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The variables of a stage and a microbatch.

    Attributes:
        forward: start of its `F`.
        grad: start of its `I`, or of its `B`.
        weight: start of its `W`, if it has one.
        whole: whether it does a `B`; None where that never helps.
        grad_end: end of its `I` or `B`.
        end: from when on nothing of it is held.
    """

    forward: Any
    grad: Any
    weight: Any
    whole: Any
    grad_end: Any
    end: Any


class Question:
    """What is the shortest schedule?

    Args:
        solver: the module `ortools.sat.python.cp_model`.
        costs: in whole ticks; all but transfers are at least 1.
        placement: for each stage its device.
        num_microbatches: at least 1.
        limits: for each device the most (stage, microbatch) pairs that it may hold.
    """

    def __init__(
        self,
        solver: Any,
        costs: StageCosts,
        placement: Sequence[int],
        num_microbatches: int,
        limits: Sequence[int],
    ) -> None:
        self._solver = solver
        self._costs = costs
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._limits = limits
        self._model = solver.CpModel()
        self._horizon = 0

    def answer(
        self, start: Schedule, seconds: float, workers: int
    ) -> tuple[tuple[tuple[Action, ...], ...] | None, Fraction]:
        """Searches.

        Args:
            start: a schedule within the limits.
            seconds: how long at most.
            workers: how many threads.

        Returns:
            The rows of the best schedule, None if none was found in the time, and a bound in ticks.
        """
        model = self._model
        ticks = Costs(*dataclasses.astuple(self._costs))
        timeline = simulate(start, ticks)
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
            return self._rows(run, pairs), proved
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
        """What a pair waits for: its neighbours, and the microbatch before."""
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
        """One action at a time, and no more pairs held than the limit."""
        model, costs = self._model, self._costs
        work: list[Any] = []
        held: list[Any] = []
        own = [(key, pair) for key, pair in pairs.items() if self._placement[key[0]] == device]
        for (stage, _), pair in own:
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
        if self._limits[device] < len(own):
            model.add_cumulative(held, [1] * len(held), self._limits[device])

    def _interval(self, start: Any, end: Any) -> Any:
        size = self._model.new_int_var(0, self._horizon, "")
        return self._model.new_interval_var(start, size, end, "")

    def _rows(
        self, run: Any, pairs: dict[tuple[int, int], _Pair]
    ) -> tuple[tuple[Action, ...], ...]:
        rows: list[list[tuple[int, Action]]] = [[] for _ in self._limits]
        for (stage, m), pair in pairs.items():
            row = rows[self._placement[stage]]
            whole = pair.whole is not None and run.boolean_value(pair.whole)
            row.append((run.value(pair.forward), Action(stage, "F", m)))
            row.append((run.value(pair.grad), Action(stage, "B" if whole else "I", m)))
            if not whole:
                row.append((run.value(pair.weight), Action(stage, "W", m)))
        return tuple(tuple(action for _, action in sorted(row)) for row in rows)
