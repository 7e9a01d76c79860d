"""The best plan for some devices, and the nearest one that fits into memory."""

from __future__ import annotations

import math
import time

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan.candidates import Asked, rated
from pipemesh.plan.cuts import cut_to_fit, fits, with_better_cuts
from pipemesh.plan.figures import Figures
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.stage_costs import evenly_cut

TRIALS = 4
"""Of how many of the best plans steps are run: their forecasts differ by less than they are off."""

# What of the time is left to move the cuts of the best plans.
_FOR_CUTS = 0.3
# Seconds to look for the nearest plan that fits.
_FOR_NEAREST = 20.0
# How many of them.
_MOVED = 10
# How many times as long a plan with stages of equal seconds takes at most as with its best cuts.
_SLACK = 1.5


def search(
    figures: Figures, asked: Asked, *, seconds: float = 8.0, count: int = 10
) -> list[Prediction]:
    """The shortest steps that fit, of mesh, layout, partition, schedule, microbatches and remat.

    All combinations are rated by a formula and simulated in that order, until the time is over
    (twice as much while none fits) or all are done. Then layers are moved over the cuts of the best
    ones, as long as that helps.

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
    tight: list[Prediction] = []
    refused: PipemeshError | None = None
    for candidate in rated(figures, asked):
        # To find any plan is worth as much time again.
        if time.monotonic() > (end - _FOR_CUTS * seconds if found else end + seconds):
            break
        plan: Plan | None = None
        try:
            # Other cuts are hardly faster than those of equal seconds, so few need to be found.
            until = sorted(_SLACK * each.seconds for each in found)[count - 1 : count]
            plan = candidate.plan(figures, asked)
            each = _fitting(plan, figures, asked, *until)
        except PipemeshError as error:
            # Such as of a table for other numbers of microbatches. Of a plan that can be made the
            # reason says more.
            refused = error if refused is None or plan is not None else refused
            continue
        (found if fits(each, asked) else tight).append(each)
    found, tight = _different(found), _different(tight)
    if "boundaries" not in asked.fixed:
        for number, each in enumerate(found[:_MOVED]):
            found[number] = with_better_cuts(each, figures, asked, end)
        last = end if found else max(end, time.monotonic() + seconds)
        found += _made_to_fit(found, tight, figures, asked, last)
    if not found:
        leanest = min(tight, key=lambda each: max(each.memory), default=None)
        raise _nothing(figures, asked, leanest, refused)
    return [predict(each.plan, figures, asked.batch) for each in _different(found)[:count]]


def _made_to_fit(
    found: list[Prediction],
    tight: list[Prediction],
    figures: Figures,
    asked: Asked,
    end: float,
) -> list[Prediction]:
    """Plans that fit with other cuts: those that may be faster than what fits already, or any.

    Args:
        found: what fits.
        tight: what does not, shortest step first.
        figures: of the model's layers.
        asked: batch and memory.
        end: when to stop, by `time.monotonic`.
    """
    best = min((each.seconds for each in found), default=math.inf)
    made: list[Prediction] = []
    if not found:
        tight = sorted(tight, key=lambda each: max(each.memory))
    for each in tight:
        if each.seconds >= _SLACK * best or time.monotonic() > end:
            break
        moved = with_better_cuts(each, figures, asked, end)
        if fits(moved, asked):
            made.append(moved)
            best = min(best, moved.seconds)
    return made


def _fitting(plan: Plan, figures: Figures, asked: Asked, until: float = math.inf) -> Prediction:
    """The forecast of a plan, cut into stages of equal seconds, or else of such as fit.

    Args:
        plan: with boundaries, which stay, or without.
        figures: of the model's layers.
        asked: batch and memory.
        until: seconds from which on it does not matter whether the plan fits.

    Raises:
        PipemeshError: the batch or the layers cannot be cut so.
    """
    if plan.boundaries is not None:
        return predict(plan, figures, asked.batch, parts=False)
    plan = evenly_cut(plan, figures, asked.batch)
    each = predict(plan, figures, asked.batch, parts=False)
    return cut_to_fit(each, figures, asked) if each.seconds < until else each


def _different(found: list[Prediction]) -> list[Prediction]:
    """Forecasts, shortest first, without schedules that are the same table by another name."""
    known: set[tuple[object, ...]] = set()
    kept: list[Prediction] = []
    for each in sorted(found, key=lambda each: each.seconds):
        plan = each.plan
        key = (plan.mesh, plan.layout, plan.boundaries, plan.remat, plan.table)
        if key not in known:
            known.add(key)
            kept.append(each)
    return kept


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
    refused: PipemeshError | None = None
    end = time.monotonic() + _FOR_NEAREST
    for candidate in rated(figures, asked):
        if time.monotonic() > end:
            break
        try:
            other = candidate.plan(figures, asked)
            theirs = other.to_values()
            # Where layers are cut follows from the rest.
            changes = sum(mine[n] != theirs[n] for n in mine if n not in ("boundaries", "layout"))
            if best is not None and changes > best[0]:
                continue
            each = _fitting(other, figures, asked)
        except PipemeshError as error:
            refused = refused or error
            continue
        if not fits(each, asked):
            if leanest is None or max(each.memory) < max(leanest.memory):
                leanest = each
        elif best is None or (changes, each.seconds) < best:
            best, chosen = (changes, each.seconds), each
    if chosen is None:
        raise _nothing(figures, asked, leanest, refused)
    return predict(chosen.plan, figures, asked.batch)


def _nothing(
    figures: Figures, asked: Asked, leanest: Prediction | None, refused: PipemeshError | None
) -> PlanError:
    if leanest is not None:
        return PlanError(
            f"no plan fits into {asked.memory:,.0f} bytes a device, of those that were tried; the "
            f"one that needs least, {max(leanest.memory):,.0f}, is '{leanest.plan}'; use more "
            "devices or memory, a smaller batch, or fix less of the plan"
        )
    fixed = " ".join(f"{name}={text}" for name, text in asked.fixed.items())
    return PlanError(
        f"no plan of {asked.devices} devices, {len(figures.layers)} layers and {asked.batch} rows"
        + (f" with {fixed}" if fixed else "")
        + (f": {refused}" if refused else "; use other numbers, or fix less of the plan")
    )
