"""Changes of a run's plan, each simulated with what actions took in its timed step."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.plan import Figures, Plan, Prediction, Remat, SearchSpace, predict
from pipemesh.plan.figures import Curve, LayerFigures
from pipemesh.plan.homes import home_of
from pipemesh.plan.plan import divisors
from pipemesh.plan.search import DATA, SCHEDULES, Split, with_better_cuts
from pipemesh.plan.stages import bytes_of, evenly_cut
from pipemesh.report.measured_step import corrected
from pipemesh.report.record import Run
from pipemesh.schedule import Costs, Timeline

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


def changes(
    plan: Plan,
    figures: Figures,
    batch: int,
    *,
    memory: float | None = None,
    knows_rows: bool = True,
    knows_halves: bool = True,
    knows_layers: bool = True,
    knows_links: bool = True,
    cuts_given: bool = True,
) -> list[Change]:
    """Simulates all changes of one kind of setting.

    Microbatches: all numbers that divide the batch. Schedules: those of the search of plans; layers
    are cut again if a schedule has other stages. Cuts: stages of equal seconds, and layers moved
    from there as long as that helps. Remat: none. Mesh: fewer stages, and more replicas.

    Args:
        plan: the plan of the step, with boundaries.
        figures: figures by which the step takes as long as it did (`corrected`).
        batch: rows of a batch.
        memory: bytes of a device; plans that need more are left out. None for no limit.
        knows_rows: whether figures say how times depend on rows.
        knows_halves: whether figures have the times of `I` and `W`.
        knows_layers: whether figures are of single layers; whole stages cannot be cut again.
        knows_links: whether figures say how long sums over replicas take.
        cuts_given: whether boundaries were given to the run. Then a change has to give others,
            even for one stage.

    Returns:
        The changes that are possible, shortest step first.

    Raises:
        PlanError: no forecast exists for such a plan.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.figures import figures_of_costs
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 2, rows=4)))
        >>> plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 1, 2), remat="none")
        >>> changes(plan, figures, batch=8, knows_links=False)[0].flags
        '--num_microbatches=8'
    """
    possible: list[Change] = []
    for kind, other in _others(plan, figures, batch, knows_rows, knows_layers, knows_links):
        try:
            prediction = predict(other, figures, batch, parts=False)
        except PipemeshError:
            # The batch or the layers cannot be split in this way.
            continue
        if memory is not None and max(prediction.memory) > memory:
            continue
        supposed: list[str] = []
        if kind == "microbatches" and not knows_rows:
            supposed.append("times are proportional to rows")
        halves = any(action.kind in "IW" for row in other.table.rows for action in row)
        if kind == "schedule" and halves and not knows_halves:
            supposed.append("the halves of a backward pass take as long as the whole")
        if other.num_stages > plan.num_stages and not knows_rows:
            supposed.append("parts of a stage take no longer than the stage")
        if kind == "remat" and not knows_rows:
            supposed.append("recomputation takes time in proportion to its flops")
        values = {name: now for name, (_, now) in plan.changes(other).items()}
        if other.num_stages == 1 and not cuts_given:
            values.pop("boundaries", None)
        if any(each.values == values for each in possible):
            continue
        possible.append(Change(kind, values, prediction, "; ".join(supposed)))
    return sorted(possible, key=lambda each: each.prediction.seconds)


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


def best_of_each(ordered: Sequence[Change]) -> list[Change]:
    """Returns the first change of each kind, in their order."""
    kinds: dict[str, Change] = {}
    for change in ordered:
        kinds.setdefault(change.kind, change)
    return list(kinds.values())


def _others(
    plan: Plan,
    figures: Figures,
    batch: int,
    knows_rows: bool,
    knows_layers: bool,
    knows_links: bool,
) -> Iterator[tuple[str, Plan]]:
    """Returns the plans to simulate, each with the kind of its change."""
    for number in divisors(max(1, batch // plan.num_replicas)):
        times = max(number / plan.num_microbatches, plan.num_microbatches / number)
        if number != plan.num_microbatches and (knows_rows or times <= _FARTHEST):
            yield from _made("microbatches", plan, num_microbatches=number)
    if plan.mesh.num_stages > 1:
        for name in SCHEDULES:
            if name != plan.schedule:
                yield from _scheduled(plan, name, figures, batch, knows_layers)
    if knows_layers and plan.num_stages > 1:
        yield from _recut(plan, figures, batch)
    if not (plan.remat.is_custom or plan.remat.is_none):
        yield from _made("remat", plan, remat=Remat.NONE)
    if knows_layers and knows_links:
        yield from _meshes(plan, figures, batch)


def _made(kind: str, plan: Plan, **values: object) -> Iterator[tuple[str, Plan]]:
    """Returns a plan with other values, or nothing if it is invalid."""
    try:
        yield kind, dataclasses.replace(plan, **values)
    except PipemeshError:
        # No such table for so many homes and microbatches.
        return


def _scheduled(
    plan: Plan, name: str, figures: Figures, batch: int, knows_layers: bool
) -> Iterator[tuple[str, Plan]]:
    """Returns a plan with another schedule, cut again if it has other stages."""
    for _, other in _made("schedule", plan, schedule=name, boundaries=None):
        if other.table.stage_devices == plan.table.stage_devices:
            yield "schedule", dataclasses.replace(other, boundaries=plan.boundaries)
        elif knows_layers and other.num_stages <= len(figures.layers):
            yield "schedule", evenly_cut(other, figures, batch)


def _recut(plan: Plan, figures: Figures, batch: int) -> Iterator[tuple[str, Plan]]:
    """Returns plans with other boundaries."""
    space = SearchSpace(plan.mesh.num_devices, batch)
    end = time.monotonic() + _SECONDS
    for begin in dict.fromkeys((evenly_cut(plan, figures, batch), plan)):
        best = predict(begin, figures, batch, parts=False)
        better = with_better_cuts(best, figures, space, end).plan
        if better.boundaries != plan.boundaries:
            yield "cuts", better


def _meshes(plan: Plan, figures: Figures, batch: int) -> Iterator[tuple[str, Plan]]:
    """Returns plans for the same devices with fewer stages and more replicas."""
    num_homes, replicas = plan.mesh.num_stages, plan.num_replicas
    group = plan.mesh.num_devices // num_homes // replicas
    axes = {DATA} if plan.num_replicas > 1 else set[str]()
    if not isinstance(plan.schedule, str) or group > 1 or {*_axes(plan)} - axes:
        # Axes with other names, or layers split over devices, were chosen by the user.
        return
    fixed = {
        name: text
        for name, text in plan.to_values().items()
        if name not in ("mesh", "layout", "boundaries", "schedule", "num_microbatches", "remat")
    }
    space = SearchSpace(plan.mesh.num_devices, batch, fixed=fixed)
    for fewer in divisors(num_homes):
        if fewer == num_homes:
            continue
        schedule = plan.schedule if fewer > 1 else "1f1b"
        more = replicas * num_homes // fewer
        # The same number of microbatches, and the same size.
        for number in {plan.num_microbatches, max(1, plan.num_microbatches * fewer // num_homes)}:
            candidate = Split(fewer, more, 1, schedule, number, plan.remat)
            try:
                yield "mesh", evenly_cut(candidate.plan(figures, space), figures, batch)
            except PipemeshError:
                # No such table for so many homes and microbatches.
                continue


def _axes(plan: Plan) -> list[str]:
    return [name for name, _ in plan.mesh.axes if name != "layers"]


@dataclasses.dataclass(frozen=True)
class Basis:
    """A plan, and figures by which its step takes as long as the timed one.

    Attributes:
        plan: the plan of the run, with its boundaries.
        figures: corrected by the timed step.
        batch: rows of a batch.
        memory: bytes of a device; None if the limit is not known.
        knows_rows: whether the dependence of times on rows was measured.
        knows_halves: whether `I` and `W` were measured.
        knows_layers: whether figures are of single layers, and not of whole stages.
        knows_memory: whether the memory of layers is known.
        cuts_given: whether boundaries were given to the run.
    """

    plan: Plan
    figures: Figures
    batch: int
    memory: float | None
    knows_rows: bool
    knows_halves: bool
    knows_layers: bool
    knows_memory: bool
    cuts_given: bool

    def changes(self) -> list[Change]:
        """Returns all changes that fit, shortest step first.

        Raises:
            PlanError: no forecast exists for the plan.
        """
        return changes(
            self.plan,
            self.figures,
            self.batch,
            memory=self.memory if self.knows_memory else None,
            knows_rows=self.knows_rows,
            knows_halves=self.knows_halves,
            knows_layers=self.knows_layers,
            knows_links=self.knows_rows,
            cuts_given=self.cuts_given,
        )


def basis_of(run: Run) -> Basis | str:
    """Returns plan and figures of a run, for the simulation of changes.

    Args:
        run: a run with a timed step.

    Returns:
        The basis; or, in words, why changes cannot be simulated.

    Example:
        >>> import tempfile
        >>> from pipemesh.report import Record, basis_of, read
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
    cores = forecast.get("cores")
    layer_figures = dataclasses.replace(
        layer_figures, cores=None if cores is None else float(cores)
    )
    cuts_given = plan.boundaries is not None
    plan = dataclasses.replace(plan, boundaries=cuts)
    if plan.table.rows != measured.schedule.rows:
        # The schedule was searched for on this machine, or its file has changed since.
        plan = dataclasses.replace(plan, schedule=measured.schedule)
    timed = run.fact("schedule", "seconds")
    seconds = None if timed is None else float(timed)
    halves = any(action.kind in "IW" for row in measured.schedule.rows for action in row)
    limit = forecast.get("device_memory")
    return Basis(
        plan=plan,
        figures=corrected(layer_figures, plan, batch, measured, seconds, steps[1:]),
        batch=batch,
        memory=None if limit is None else float(limit),
        knows_rows=figures is not None,
        knows_halves=halves or figures is not None,
        knows_layers=figures is not None or bool(layers),
        knows_memory=knows_memory,
        cuts_given=cuts_given,
    )


def _in_seconds(measured: Timeline) -> Timeline:
    """Returns a timeline of milliseconds in seconds."""
    costs = measured.costs.per_stage(measured.schedule.num_stages)
    fields = (costs.forward, costs.backward, costs.input_grad, costs.weight_grad)
    starts, ends = (
        tuple(tuple(_MILLISECOND * time for time in row) for row in times)
        for times in (measured.starts, measured.ends)
    )
    scaled = Costs(*([_MILLISECOND * value for value in field] for field in fields))
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

    def line(value: Any) -> Curve:
        return Curve(((rows, float(value)),))

    return Figures(
        tuple(
            LayerFigures(
                name=str(layer.get("name", number)),
                seconds={"F": line(layer["flops"]), "B": line(2 * layer["flops"])},
                parameter_bytes=int((layer.get("parameter_bytes") or 0) / group),
                kept=line(wide * (layer.get("activation_bytes") or 0) / group),
                # A byte, so that something is sent.
                outputs=line(wide * (layer.get("output_bytes") or 1)),
            )
            for number, layer in enumerate(layers)
        ),
        # Replicas share it.
        optimizer=replicas * states / weights if weights else 0.0,
    )


def _of_stages(measured: Timeline, rows: float) -> Figures:
    """Returns each stage as one layer, with nothing but its times."""
    durations = measured.costs.per_stage(measured.schedule.num_stages).durations()
    nothing, little = Curve(((rows, 0.0),)), Curve(((rows, 1.0),))
    return Figures(
        tuple(
            LayerFigures(
                name=f"stage {stage}",
                seconds={kind: Curve(((rows, durations[kind][stage]),)) for kind in "FB"},
                parameter_bytes=0,
                kept=nothing,
                outputs=little,
            )
            for stage in range(measured.schedule.num_stages)
        )
    )
