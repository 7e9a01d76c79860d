"""What the record of a training gives to simulate changes of its plan with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.plan import Figures, Plan
from pipemesh.plan.figures import Curve, LayerFigures
from pipemesh.plan.homes import home_of
from pipemesh.plan.stages import bytes_of
from pipemesh.report.change.changes import Change, changes
from pipemesh.report.change.corrected import corrected
from pipemesh.report.run import Run
from pipemesh.schedule import Costs, Timeline

_MILLISECOND = 1e-3


@dataclasses.dataclass(frozen=True)
class Basis:
    """A plan, and figures by which its step takes as long as the one that was timed.

    Attributes:
        plan: with the boundaries that it ran with.
        figures: corrected by the step.
        batch: rows.
        memory: bytes of a device; None if no limit is known.
        knows_rows: whether it was measured how times depend on rows.
        knows_halves: whether it was measured what an `I` and a `W` take.
        knows_layers: whether something is known of each layer, and not of whole stages alone.
        knows_memory: whether it is known what layers hold.
        cuts_given: whether the training was given its boundaries.
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
        """All changes that fit, shortest step first.

        Raises:
            PlanError: nothing can be said of the plan.
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
    """What changes of a training's plan can be simulated with; or why they cannot, in words.

    Args:
        run: what was recorded, with a step that was timed.
    """
    measured = run.measured()
    if measured is None:
        return "no step was timed; train with --trace_schedule"
    forecast = run.last.get("forecast", {})
    rows, cuts = forecast.get("rows"), forecast.get("cuts")
    if not rows or not cuts:
        return "the record does not say how large a batch is and where layers were cut"
    if {action.kind for row in measured.schedule.rows for action in row} - set("FBIW"):
        return "nothing is forecast of schedules that recompute in actions of their own"
    if measured.schedule.num_slices > 1:
        return "nothing is forecast of schedules that slice sequences"
    try:
        steps = [_in_seconds(each) for each in run.timed()]
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
    measured = steps[0]
    plan = Plan.from_values(run.pairs("begin", "plan"))
    figures, layers = forecast.get("figures"), forecast.get("layers")
    knows_memory = True
    if figures is not None:
        found = Figures.from_json(json.dumps(figures), "the record")
    elif layers:
        knows_memory = all(None not in layer.values() for layer in layers)
        found = _of_flops(layers, forecast, plan, batch)
    else:
        knows_memory = False
        found = _of_stages(measured, batch / plan.num_microbatches / plan.num_replicas)
        cuts = tuple(range(measured.schedule.num_stages + 1))
    cores = forecast.get("cores")
    found = dataclasses.replace(found, cores=None if cores is None else float(cores))
    cuts_given = plan.boundaries is not None
    plan = dataclasses.replace(plan, boundaries=cuts)
    if plan.table.rows != measured.schedule.rows:
        # A table that was found for this machine, or read from a file that is another one now.
        plan = dataclasses.replace(plan, schedule=measured.schedule)
    timed = run.fact("schedule", "seconds")
    seconds = None if timed is None else float(timed)
    halves = any(action.kind in "IW" for row in measured.schedule.rows for action in row)
    limit = forecast.get("device_memory")
    return Basis(
        plan=plan,
        figures=corrected(found, plan, batch, measured, seconds, steps[1:]),
        batch=batch,
        memory=None if limit is None else float(limit),
        knows_rows=figures is not None,
        knows_halves=halves or figures is not None,
        knows_layers=figures is not None or bool(layers),
        knows_memory=knows_memory,
        cuts_given=cuts_given,
    )


def _in_seconds(measured: Timeline) -> Timeline:
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
    """Layers whose times are their flops; a backward pass has twice as many."""
    replicas = plan.num_replicas
    rows = batch / plan.num_microbatches / replicas
    # Each of the devices that share a layer has a slice of it.
    group = len(home_of(plan.mesh, plan.layout, 0)) // replicas
    held = forecast.get("devices") or ()
    weights = sum(float(each["weights"]) for each in held)
    states = sum(float(each["optimizer"]) for each in held)
    # Bytes of layers are counted in the plan's dtype; those of figures are of float32.
    wide = bytes_of(None) / bytes_of(plan.compute_dtype)

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
    """Each stage as one layer, of which nothing is known but its times."""
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
