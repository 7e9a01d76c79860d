"""Changes of a run's plan, each simulated with what actions took in its timed step."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, Prediction, Remat, SearchSpace, predict
from pipemesh.plan.figures import DATA, figures_of_costs
from pipemesh.plan.homes import home_of
from pipemesh.plan.plan import divisors
from pipemesh.plan.search import SCHEDULES, Split, with_better_cuts
from pipemesh.plan.stages import bytes_of, evenly_cut
from pipemesh.report.measured_step import corrected
from pipemesh.report.record import Run
from pipemesh.schedule import Costs, Schedule, Timeline

# How much smaller or larger microbatches may be if no times were measured for them: their actions
# are then assumed to take time in proportion to their rows.
_FARTHEST = 4
LEAST, LEAST_SUPPOSED = 0.02, 0.05
"""The share of a step that a change must save to be named, without and with assumptions: steps vary
by the first, and an assumption may be wrong by the second."""
# Time limit for moving layers over cuts.
_SECONDS = 2.0
_MILLISECOND = 1e-3


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a plan.

    Attributes:
        kind: `microbatches`, `schedule`, `cuts`, `remat` or `mesh`.
        values: the changed values of the plan, as in `Plan.to_values`.
        prediction: of a step under the changed plan.
        supposed: the assumptions in place of measurements; "" if there are none.
    """

    kind: str
    values: Mapping[str, str]
    prediction: Prediction
    supposed: str = ""

    @property
    def words(self) -> list[str]:
        """The flags for a run under the changed plan, quoted for a shell."""
        return [
            shlex.quote(f"--{'mesh_shape' if name == 'mesh' else name}={text}")
            for name, text in self.values.items()
        ]

    @property
    def flags(self) -> str:
        """All flags in one line."""
        return " ".join(self.words)


def best(ordered: Sequence[Change], now: float) -> Change:
    """Returns the change to name; `now` is the time of the current plan."""
    # A change without assumptions is preferred if it helps at least half as much as the best one.
    # Of those within 2% of the best, the one with the fewest flags is named.
    most = now - ordered[0].prediction.seconds
    measured = [e for e in ordered if not e.supposed and now - e.prediction.seconds >= most / 2 > 0]
    candidates = measured or ordered
    until = candidates[0].prediction.seconds + LEAST * now
    near = [change for change in candidates if change.prediction.seconds <= until]

    def key(change: Change) -> tuple[int, int, float]:
        prediction = change.prediction
        return len(change.values), round(1e3 * prediction.seconds / now), max(prediction.memory)

    return min(near, key=key)


def least(change: Change) -> float:
    """Returns the share of a step that a change must save to be named."""
    return LEAST_SUPPOSED if change.supposed else LEAST


@dataclasses.dataclass(frozen=True)
class Basis:
    """A plan, and figures by which its step takes as long as a timed one.

    Attributes:
        plan: the plan of the step, with boundaries.
        figures: corrected by the timed step (`corrected`).
        batch: rows of a batch.
        memory: bytes of a device; None if the limit is not known.
        knows_rows: whether figures say how times depend on rows, and how long sums over replicas
            take.
        knows_halves: whether figures have the times of `I` and `W`.
        knows_layers: whether figures are of single layers; whole stages cannot be cut again.
        knows_memory: whether the memory of layers is known.
        cuts_given: whether boundaries were given to the run. Then a change has to give others,
            even for one stage.
    """

    plan: Plan
    figures: Figures
    batch: int
    memory: float | None = None
    knows_rows: bool = True
    knows_halves: bool = True
    knows_layers: bool = True
    knows_memory: bool = True
    cuts_given: bool = True

    def changes(self) -> list[Change]:
        """Simulates all changes of one kind of setting.

        Microbatches: all numbers that divide the batch. Schedules: those of the search of plans;
        layers are cut again if a schedule has other stages. Cuts: stages of equal seconds, and
        layers moved from there as long as that helps. Remat: none. Mesh: fewer stages, and more
        replicas.

        Returns:
            The changes that are possible and fit into the memory, shortest step first.

        Raises:
            PlanError: no forecast exists for the plan.

        Example:
            >>> from pipemesh.partition import LayerCost
            >>> from pipemesh.plan.figures import figures_of_costs
            >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 2, rows=4)))
            >>> plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 1, 2), remat="none")
            >>> Basis(plan, figures, batch=8, knows_rows=False).changes()[0].flags
            '--num_microbatches=8'
        """
        possible: list[Change] = []
        for kind, make in self._others():
            try:
                other = make()
                prediction = predict(other, self.figures, self.batch, parts=False)
            except PipemeshError:
                # The batch or the layers cannot be split in this way, or no such schedule exists.
                continue
            fullest = max(prediction.memory)
            if self.memory is not None and self.knows_memory and fullest > self.memory:
                continue
            supposed: list[str] = []
            if kind == "microbatches" and not self.knows_rows:
                supposed.append("times are proportional to rows")
            if kind == "schedule" and _has_halves(other.table) and not self.knows_halves:
                supposed.append("the halves of a backward pass take as long as the whole")
            if other.num_stages > self.plan.num_stages and not self.knows_rows:
                supposed.append("parts of a stage take no longer than the stage")
            if kind == "remat" and not self.knows_rows:
                supposed.append("recomputation takes time in proportion to its flops")
            values = {name: now for name, (_, now) in self.plan.changes(other).items()}
            if other.num_stages == 1 and not self.cuts_given:
                values.pop("boundaries", None)
            if all(each.values != values for each in possible):
                possible.append(Change(kind, values, prediction, "; ".join(supposed)))
        return sorted(possible, key=lambda each: each.prediction.seconds)

    def _others(self) -> Iterator[tuple[str, Callable[[], Plan]]]:
        """Yields the kind of each change, and a function that returns the changed plan; it raises a
        PipemeshError if there is no such plan.
        """
        plan = self.plan
        for number in divisors(max(1, self.batch // plan.num_replicas)):
            times = max(number / plan.num_microbatches, plan.num_microbatches / number)
            if number != plan.num_microbatches and (self.knows_rows or times <= _FARTHEST):
                yield "microbatches", partial(dataclasses.replace, plan, num_microbatches=number)
        if plan.mesh.num_stages > 1:
            for name in SCHEDULES:
                if name != plan.schedule:
                    yield "schedule", partial(self._scheduled, name)
        if self.knows_layers and plan.num_stages > 1:
            for better in self._recut():
                yield "cuts", partial(dataclasses.replace, plan, boundaries=better.boundaries)
        if not (plan.remat.is_custom or plan.remat.is_none):
            yield "remat", partial(dataclasses.replace, plan, remat=Remat.NONE)
        if self.knows_layers and self.knows_rows:
            yield from self._meshes()

    def _scheduled(self, name: str) -> Plan:
        """Returns a plan with another schedule, cut again if it has other stages."""
        other = dataclasses.replace(self.plan, schedule=name, boundaries=None)
        if other.table.stage_devices == self.plan.table.stage_devices:
            return dataclasses.replace(other, boundaries=self.plan.boundaries)
        if not self.knows_layers or other.num_stages > len(self.figures.layers):
            raise PlanError("the layers cannot be cut into so many stages")
        return evenly_cut(other, self.figures, self.batch)

    def _recut(self) -> Iterator[Plan]:
        """Returns plans with other boundaries."""
        space = SearchSpace(self.plan.mesh.num_devices, self.batch)
        end = time.monotonic() + _SECONDS
        evenly = evenly_cut(self.plan, self.figures, self.batch)
        for begin in dict.fromkeys((evenly, self.plan)):
            best = predict(begin, self.figures, self.batch, parts=False)
            better = with_better_cuts(best, self.figures, space, end).plan
            if better.boundaries != self.plan.boundaries:
                yield better

    def _meshes(self) -> Iterator[tuple[str, Callable[[], Plan]]]:
        """Yields meshes of the same devices with fewer stages and more replicas."""
        plan, num_homes, replicas = self.plan, self.plan.mesh.num_stages, self.plan.num_replicas
        group = plan.mesh.num_devices // num_homes // replicas
        known = {"layers", DATA} if replicas > 1 else {"layers"}
        axes = {name for name, _ in plan.mesh.axes}
        if not isinstance(plan.schedule, str) or group > 1 or axes - known:
            # Axes with other names, or layers split over devices, were chosen by the user.
            return
        fixed = {
            name: text
            for name, text in plan.to_values().items()
            if name not in ("mesh", "layout", "boundaries", "schedule", "num_microbatches", "remat")
        }
        space = SearchSpace(plan.mesh.num_devices, self.batch, fixed=fixed)

        def cut(split: Split) -> Plan:
            return evenly_cut(split.plan(self.figures, space), self.figures, self.batch)

        for fewer in divisors(num_homes)[:-1]:
            schedule = plan.schedule if fewer > 1 else "1f1b"
            more = replicas * num_homes // fewer
            # The same number of microbatches, and the same size.
            same_size = max(1, plan.num_microbatches * fewer // num_homes)
            for number in {plan.num_microbatches, same_size}:
                yield "mesh", partial(cut, Split(fewer, more, 1, schedule, number, plan.remat))


def _has_halves(table: Schedule) -> bool:
    return any(action.kind in "IW" for row in table.rows for action in row)


def basis_of(run: Run) -> Basis | str:
    """Returns plan and figures of a run, for the simulation of changes.

    Args:
        run: a run with a timed step.

    Returns:
        The basis; or, in words, why changes cannot be simulated.

    Example:
        >>> import tempfile
        >>> from pipemesh.report import Record, read
        >>> from pipemesh.report.plan_changes import basis_of
        >>> folder = tempfile.mkdtemp()
        >>> _ = Record(folder).add("begin", step=0)
        >>> basis_of(read(folder))
        'no step was timed; train with --trace_schedule'
    """
    measured = run.measured()
    if measured is None:
        return "no step was timed; train with --trace_schedule"
    forecast = run.last.get("forecast", {})
    rows, cuts = forecast.get("rows"), forecast.get("cuts")
    if not rows or not cuts:
        return "the record does not say how large a batch is and where layers were cut"
    if {action.kind for row in measured.schedule.rows for action in row} - set("FBIW"):
        return "schedules that recompute in actions of their own have no forecast"
    if measured.schedule.num_slices > 1:
        return "schedules that slice sequences have no forecast"
    try:
        steps = [_in_seconds(timeline) for timeline in run.timed()]
        return _basis(run, forecast, steps, int(rows), tuple(cuts))
    except PipemeshError as error:
        return str(error)


def _basis(
    run: Run,
    forecast: Mapping[str, Any],
    steps: Sequence[Timeline],
    batch: int,
    cuts: tuple[int, ...],
) -> Basis:
    """Returns the basis of timed steps, in seconds."""
    measured = steps[0]
    plan = Plan.from_values(run.pairs("begin", "plan"))
    figures, layers = forecast.get("figures"), forecast.get("layers")
    knows_memory = True
    if figures is not None:
        layer_figures = Figures.from_json(json.dumps(figures), "the record")
    elif layers:
        knows_memory = all(None not in layer.values() for layer in layers)
        layer_figures = _of_flops(layers, forecast, plan, batch)
    else:
        knows_memory = False
        layer_figures = _of_stages(measured, batch / plan.num_microbatches / plan.num_replicas)
        cuts = tuple(range(measured.schedule.num_stages + 1))
    layer_figures = dataclasses.replace(layer_figures, cores=forecast.get("cores"))
    cuts_given = plan.boundaries is not None
    plan = dataclasses.replace(plan, boundaries=cuts)
    if plan.table.rows != measured.schedule.rows:
        # The schedule was searched for on this machine, or its file has changed since.
        plan = dataclasses.replace(plan, schedule=measured.schedule)
    seconds = run.fact("schedule", "seconds")
    return Basis(
        plan=plan,
        figures=corrected(layer_figures, plan, batch, measured, seconds, steps[1:]),
        batch=batch,
        memory=forecast.get("device_memory"),
        knows_rows=figures is not None,
        knows_halves=figures is not None or _has_halves(measured.schedule),
        knows_layers=figures is not None or bool(layers),
        knows_memory=knows_memory,
        cuts_given=cuts_given,
    )


def _in_seconds(measured: Timeline) -> Timeline:
    """Returns a timeline of milliseconds in seconds."""
    durations = measured.costs.per_stage(measured.schedule.num_stages).durations()
    starts, ends = (
        tuple(tuple(_MILLISECOND * time for time in row) for row in times)
        for times in (measured.starts, measured.ends)
    )
    scaled = Costs(*([_MILLISECOND * value for value in durations[kind]] for kind in "FBIW"))
    return Timeline(measured.schedule, scaled, starts, ends)


def _of_flops(
    layers: Sequence[Mapping[str, Any]], forecast: Mapping[str, Any], plan: Plan, batch: int
) -> Figures:
    """Returns layers whose times are their flops; a backward pass has twice as many."""
    replicas = plan.num_replicas
    rows = batch / plan.num_microbatches / replicas
    # Each of the devices that share a layer has a slice of it.
    group = len(home_of(plan.mesh, plan.layout, 0)) // replicas
    held = forecast.get("devices") or ()
    # Bytes of layers are counted in the plan's dtype; those of figures are of float32.
    wide = bytes_of(None) / bytes_of(plan.compute_dtype)
    # A narrower dtype has the float32 weights, and a copy in that dtype.
    copies = 1 if wide == 1 else 1 + 1 / wide
    weights = sum(float(each["weights"]) for each in held) / copies
    states = sum(float(each["optimizer"]) for each in held)
    costs = [
        LayerCost(
            layer["flops"],
            parameter_bytes=(layer.get("parameter_bytes") or 0) / group,
            activation_bytes=wide * (layer.get("activation_bytes") or 0) / group,
            # A byte, so that something is sent.
            boundary_bytes=wide * (layer.get("output_bytes") or 1),
            name=str(layer.get("name", "")),
        )
        for layer in layers
    ]
    # Replicas share the state of the optimizer.
    optimizer = replicas * states / weights if weights else 0.0
    return Figures(tuple(figures_of_costs(costs, rows)), optimizer=optimizer)


def _of_stages(measured: Timeline, rows: float) -> Figures:
    """Returns each stage as one layer, with nothing but its times."""
    durations = measured.costs.per_stage(measured.schedule.num_stages).durations()
    costs = [
        LayerCost(forward, backward=backward, boundary_bytes=1, name=f"stage {stage}")
        for stage, (forward, backward) in enumerate(
            zip(durations["F"], durations["B"], strict=True)
        )
    ]
    return Figures(tuple(figures_of_costs(costs, rows)))
