"""Figures of a model on this machine, from its layers and a few whole steps."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Plan, Remat
from pipemesh.plan.calibration import Measured, fitted
from pipemesh.plan.figures import PLAIN, Figures
from pipemesh.plan.network import Link
from pipemesh.training.measuring.action_times import in_turn, usual
from pipemesh.training.measuring.layers import AXIS, Make, MeasuredLayers
from pipemesh.training.measuring.timed_step import TimedStep
from pipemesh.training.measuring.trials import in_rounds
from pipemesh.training.subject import rows_of

# Defaults: the least overhead of an action, and the speed of a link within one machine.
_ACTION, _LINK, _CROWDING = 2e-5, Link(5e-5, 4e9), 0.5
_STEPS = 30


def measure(
    make: Make, batch: Any, devices: int, say: Callable[[str], None] = lambda text: None
) -> Figures:
    """Returns the figures of a model: each layer timed as a stage, the rest fitted to whole steps.

    `pipemesh.plan.calibration` fits overheads, links and how many cores the devices share.
    Raises PlanError if the model has no pipeline, or does not follow the partition of a plan.
    """
    rows = rows_of(batch)
    sizes = sorted({1, *(max(1, rows // n) for n in (16, 8, 4, 2)), rows})
    on_cpu = make(Plan()).device_type == "CPU"
    layers = MeasuredLayers(make, batch, sizes, say, on_cpu, devices)
    figures = Figures(
        tuple(layers.layers),
        action=max(_ACTION, layers.action),
        fixed=layers.fixed,
        update=layers.update,
        optimizer=layers.optimizer,
        update_memory=layers.update_memory,
        transfer=_LINK,
        sums=_LINK if layers.rules else None,
        crowding=_CROWDING,
        cores=float(os.cpu_count() or 1) if on_cpu else None,
        rules=layers.rules,
        batch=rows,
        about=f"{make(Plan()).name}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{devices} devices",
    )
    plans = list(plans_to_fit(figures, devices))
    whole: list[TimedStep] = []
    for plan in plans:
        say(f"a step of '{plan}'")
        whole.append(TimedStep(make(plan), batch))
    seconds, work = in_rounds(whole, _STEPS)
    steps = in_turn(seconds)
    told: list[Measured] = []
    for plan, took, done, every in zip(
        plans, steps, in_turn(work), zip(*seconds, strict=True), strict=True
    ):
        spread = statistics.median(every) / usual(every) - 1
        told.append(Measured(plan, rows, took, spread=spread))
        if on_cpu:
            # Other programs lengthen a step, but not its core time.
            told.append(Measured(plan, rows, done, is_work=True))
    return dataclasses.replace(fitted(figures, told), plain_step=steps[plans.index(PLAIN)])


def plans_to_fit(figures: Figures, devices: int) -> Iterator[Plan]:
    """Yields plans whose times separate the fitted quantities."""
    rows = figures.batch

    def divisor(of: int, most: int) -> int:
        return max(n for n in range(1, most + 1) if of % n == 0)

    yield PLAIN
    yield Plan(num_microbatches=divisor(rows, 8), remat=Remat.NONE)
    yield Plan(num_microbatches=divisor(rows, 2), remat=Remat.FULL)
    if devices < 2:
        return
    if len(figures.layers) > 1:
        yield Plan(Mesh.from_text("layers:2"), num_microbatches=divisor(rows, 4), remat=Remat.NONE)
    most = divisor(devices, len(figures.layers))
    if most > 1:
        # Many short actions.
        mesh = Mesh.from_text(f"layers:{most}")
        yield Plan(mesh, schedule="zb_h1", num_microbatches=divisor(rows, 8), remat=Remat.FULL)
    if rows % 2 == 0:
        yield Plan(
            Mesh.from_text("layers:1;data:2"), LayoutRules.from_text("batch:data"), remat=Remat.NONE
        )
    if devices > 2 and rows % devices == 0:
        # The most gradient all-reduces, with few examples.
        mesh = Mesh.from_text(f"layers:1;data:{devices}")
        number = divisor(rows // devices, 8)
        yield Plan(mesh, LayoutRules.from_text("batch:data"), num_microbatches=number)
    if not figures.can_share(2):
        return
    rules = LayoutRules.from_text(figures.rules)
    for number in sorted({1, divisor(rows, 8)}):
        mesh = Mesh.from_text(f"layers:1;{AXIS}:2")
        yield Plan(mesh, rules, num_microbatches=number, remat=Remat.NONE)
    most = max(n for n in range(1, devices + 1) if not devices % n and figures.can_share(n))
    if most > 2:
        # The most slices.
        mesh = Mesh.from_text(f"layers:1;{AXIS}:{most}")
        yield Plan(mesh, rules, num_microbatches=divisor(rows, 2), remat=Remat.FULL)
