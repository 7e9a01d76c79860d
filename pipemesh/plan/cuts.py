"""Where layers are cut so that a step fits into memory, and takes least."""

from __future__ import annotations

import dataclasses
import time

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, partition
from pipemesh.plan.candidates import Asked
from pipemesh.plan.figures import Figures
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.remat import NONE
from pipemesh.plan.stage_costs import stages_of
from pipemesh.schedule import simulate

# Limits that the partitioner is given in turn, from the loosest one to the tightest.
_LIMITS = 8
# How many times what devices have they may need on average; other cuts change that little.
_HOPELESS = 1.25


def cut_to_fit(found: Prediction, figures: Figures, asked: Asked) -> Prediction:
    """Cuts layers by their memory, too, where a step needs more than a device has.

    The partitioner counts less exactly than the forecast, so it is asked with other limits until
    the forecast fits, those first that leave it most choice.

    Args:
        found: whose plan has boundaries.
        figures: of the model's layers.
        asked: with the limit.

    Returns:
        The first forecast that fits, else the one that needs least.
    """
    if asked.memory is None or fits(found, asked) or found.plan.num_stages == 1:
        return found
    if sum(found.memory) > _HOPELESS * asked.memory * len(found.memory):
        return found
    stages = stages_of(found.plan, figures, asked.batch)
    costs = [
        LayerCost(
            forward=layer.takes("F", stages.rows) / stages.shared(layer),
            backward=layer.takes("B", stages.rows) / stages.shared(layer),
            parameter_bytes=layer.parameter_bytes / stages.shared(layer),
            activation_bytes=layer.holds(stages.rows, stages.shared(layer)),
            boundary_bytes=layer.outputs.at(stages.rows),
        )
        for own in stages.layers
        for layer in own
    ]
    halves = any(action.kind == "W" for row in stages.table.rows for action in row)
    is_full = not halves and NONE not in stages.modes.values()
    facts = simulate(stages.table).for_partition()
    leanest, tried = found, {found.plan.boundaries}
    for number in range(_LIMITS):
        try:
            cuts = partition(
                costs,
                found.plan.num_stages,
                memory_limit=asked.memory * 2 ** ((_LIMITS - 3 - number) / 4),
                optimizer_bytes_per_parameter_byte=1 + figures.optimizer / stages.replicas,
                remat="full" if is_full else "none",
                **facts,
            ).boundaries
        except PartitionError:
            # Tighter limits cannot be met either.
            break
        if cuts in tried:
            continue
        tried.add(cuts)
        other = _with_cuts(found, cuts, figures, asked)
        if fits(other, asked):
            return other
        leanest = min(leanest, other, key=lambda each: max(each.memory))
    return leanest


def fits(found: Prediction, asked: Asked) -> bool:
    """Whether no device needs more memory than it has."""
    return asked.memory is None or max(found.memory) <= asked.memory


def with_better_cuts(best: Prediction, figures: Figures, asked: Asked, end: float) -> Prediction:
    """Moves one layer over a cut at a time, as long as that makes the step fit, or shorter.

    Args:
        best: to begin with; its plan has boundaries.
        figures: of the model's layers.
        asked: batch and memory.
        end: when to stop, by `time.monotonic`.
    """

    def rate(each: Prediction) -> tuple[float, float]:
        limit = asked.memory
        return sum(max(0.0, m - limit) for m in each.memory) if limit else 0.0, each.seconds

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
                other = _with_cuts(best, (*cuts[:place], cut, *cuts[place + 1 :]), figures, asked)
                (over, seconds), (most, until) = rate(other), rate(best)
                if over < most or (over == most and seconds < until * (1 - 1e-9)):
                    best, moved = other, True
                    cuts = best.plan.boundaries or ()
    return best


def _with_cuts(
    found: Prediction, cuts: tuple[int, ...], figures: Figures, asked: Asked
) -> Prediction:
    plan = dataclasses.replace(found.plan, boundaries=cuts)
    return predict(plan, figures, asked.batch, parts=False)
