"""The best plan for some devices, and the nearest one that fits into memory."""

from __future__ import annotations

import dataclasses
import time

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan.candidates import Asked, rated
from pipemesh.plan.figures import Figures
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict

TRIALS = 4
"""Of how many of the best plans steps are run: their forecasts differ by less than they are off."""

# What of the time is left to move the cuts of the best plans.
_FOR_CUTS = 0.3
# How many of them.
_MOVED = 3


def search(
    figures: Figures, asked: Asked, *, seconds: float = 8.0, count: int = 10
) -> list[Prediction]:
    """The shortest steps that fit, of mesh, layout, partition, schedule, microbatches and remat.

    All combinations are rated by a formula and simulated in that order, until the time is over or
    all are done. Then layers are moved over the cuts of the best ones, as long as that helps.

    Args:
        figures: of the model's layers on the machine.
        asked: devices, batch, memory, and what of the plan is fixed.
        seconds: that it may take.
        count: how many to return at most.

    Returns:
        Shortest first.

    Raises:
        PlanError: there is no plan, or none fits; it says which needs least memory.
        PipemeshError: what is fixed is malformed.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.layer_figures import figures_of_costs
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 4, rows=1)), action=0.1)
        >>> best = search(figures, Asked(devices=4, batch=8))[0]
        >>> str(best.plan.mesh)
        'layers:1;data:4'
    """
    end = time.monotonic() + seconds
    found: list[Prediction] = []
    leanest: Prediction | None = None
    for candidate in rated(figures, asked):
        if found and time.monotonic() > end - _FOR_CUTS * seconds:
            break
        plan = candidate.plan(figures, asked)
        if plan is None:
            continue
        each = _predicted(plan, figures, asked)
        if each is None:
            continue
        if _fits(each, asked):
            found.append(each)
        elif leanest is None or max(each.memory) < max(leanest.memory):
            leanest = each
    if not found:
        raise _nothing(figures, asked, leanest)
    found.sort(key=lambda each: each.seconds)
    if "boundaries" not in asked.fixed:
        for number, each in enumerate(found[:_MOVED]):
            found[number] = with_better_cuts(each, figures, asked, end)
        found.sort(key=lambda each: each.seconds)
    return [predict(each.plan, figures, asked.batch) for each in found[:count]]


def nearest_that_fits(plan: Plan, figures: Figures, asked: Asked) -> Prediction:
    """Of all plans that fit the one of which least is otherwise, and of these the fastest.

    Args:
        plan: that does not fit.
        figures: of the model's layers on the machine.
        asked: devices, batch and memory; what is fixed stays.

    Raises:
        PlanError: none fits.
    """
    mine = plan.to_values()
    best: tuple[int, float] | None = None
    chosen: Prediction | None = None
    leanest: Prediction | None = None
    for candidate in rated(figures, asked):
        other = candidate.plan(figures, asked)
        if other is None:
            continue
        theirs = other.to_values()
        # Where layers are cut follows from the rest.
        changes = sum(mine[n] != theirs[n] for n in mine if n not in ("boundaries", "layout"))
        if best is not None and changes > best[0]:
            continue
        each = _predicted(other, figures, asked)
        if each is None:
            continue
        if not _fits(each, asked):
            if leanest is None or max(each.memory) < max(leanest.memory):
                leanest = each
        elif best is None or (changes, each.seconds) < best:
            best, chosen = (changes, each.seconds), each
    if chosen is None:
        raise _nothing(figures, asked, leanest)
    return predict(chosen.plan, figures, asked.batch)


def _predicted(plan: Plan, figures: Figures, asked: Asked) -> Prediction | None:
    try:
        return predict(plan, figures, asked.batch, parts=False)
    except PipemeshError:
        # The batch does not divide so.
        return None


def _fits(each: Prediction, asked: Asked) -> bool:
    return asked.memory is None or max(each.memory) <= asked.memory


def _nothing(figures: Figures, asked: Asked, leanest: Prediction | None) -> PlanError:
    if leanest is None:
        return PlanError(
            f"{asked.devices} devices cannot run {len(figures.layers)} layers on a batch of "
            f"{asked.batch} rows"
            + (f" with {dict(asked.fixed)}" if asked.fixed else "")
            + "; use other numbers, or fix less of the plan"
        )
    return PlanError(
        f"no plan fits into {asked.memory:,.0f} bytes a device; the one that was found to need "
        f"least, {max(leanest.memory):,.0f}, is '{leanest.plan}'; use more devices or memory, a "
        "smaller batch, or fix less of the plan"
    )


def with_better_cuts(best: Prediction, figures: Figures, asked: Asked, end: float) -> Prediction:
    """Moves one layer over a cut at a time, as long as that makes the step shorter.

    Args:
        best: to begin with; its plan has boundaries.
        figures: of the model's layers.
        asked: batch and memory.
        end: when to stop, by `time.monotonic`.
    """
    moved = True
    while moved:
        moved = False
        cuts = best.plan.boundaries or ()
        for place in range(1, len(cuts) - 1):
            for by in (-1, 1):
                if time.monotonic() > end:
                    return best
                cut = cuts[place] + by
                if not cuts[place - 1] < cut < cuts[place + 1]:
                    continue
                plan = dataclasses.replace(
                    best.plan, boundaries=(*cuts[:place], cut, *cuts[place + 1 :])
                )
                other = predict(plan, figures, asked.batch, parts=False)
                if _fits(other, asked) and other.seconds < best.seconds * (1 - 1e-9):
                    best, moved = other, True
                    cuts = plan.boundaries or ()
    return best
