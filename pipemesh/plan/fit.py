"""Figures that agree with steps that were measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import Curve
from pipemesh.plan.network import Link
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import predict

# How much a factor of e away from what figures were costs, against errors of steps: what was
# measured by itself is believed, and what was guessed is not.
_TRUST, _GUESS = 0.05, 0.001
_FIRST_STEP, _LAST_STEP = 0.5, 0.004


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that was measured.

    Attributes:
        plan: that it ran under.
        batch: rows.
        seconds: that it took.
        is_work: whether they are seconds of all cores together, `Prediction.work`, which other
            programs on the machine disturb less than the clock.
    """

    plan: Plan
    batch: int
    seconds: float
    is_work: bool = False


def fitted(figures: Figures, steps: Sequence[Measured]) -> Figures:
    """The same figures, moved until forecasts of some steps agree with what they took.

    What cannot be measured on its own is moved: what actions take beside their layers, what a step
    takes besides, the update, the link; and, which costs more, what all layers take, by one factor
    and by a power of the rows, and the cores that devices share.
    Squares of the logarithms of errors are made small by moving one factor at a time (a search
    along coordinates), with a little weight on staying where figures were.

    Args:
        figures: as they were measured; what is 0, endless or None stays so.
        steps: that were measured, of plans that differ in what is to be told apart.

    Raises:
        PlanError: a step took no time, or nothing can be said of a plan.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.layer_figures import figures_of_costs
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 2, rows=1)))
        >>> found = fitted(figures, [Measured(Plan(remat="none"), 4, 26.0)])
        >>> round(predict(Plan(remat="none"), found, 4).seconds)
        26
    """
    for step in steps:
        if not (step.seconds > 0 and math.isfinite(step.seconds)):
            raise PlanError(f"'{step.plan}' took {step.seconds} seconds; it must be above 0")
    names = [name for name, (is_there, _, _) in _FACTORS.items() if is_there(figures)]
    factors = dict.fromkeys(names, 0.0)

    def cost(factors: dict[str, float]) -> float:
        there = _moved(figures, factors)
        total = sum(_FACTORS[name][2] * factor**2 for name, factor in factors.items())
        for step in steps:
            found = predict(step.plan, there, step.batch, parts=False)
            told = found.work if step.is_work else found.seconds
            total += math.log(told / step.seconds) ** 2
        return total

    try:
        best = cost(factors)
        size = _FIRST_STEP
        while size > _LAST_STEP:
            before = best
            for name in names:
                for by in (size, -size):
                    other = factors | {name: factors[name] + by}
                    if (value := cost(other)) < best:
                        factors, best = other, value
            if best > before * (1 - 1e-3):
                size /= 2
    except PlanError:
        raise
    except PipemeshError as error:
        raise PlanError(str(error)) from error
    return _moved(figures, factors)


def _layers(figures: Figures, factor: float) -> Figures:
    layers = tuple(layer.faster(1 / factor) for layer in figures.layers)
    return dataclasses.replace(figures, layers=layers)


def _bend(figures: Figures, factor: float) -> Figures:
    """Many rows take longer, and few rows less, than was measured, or the other way round."""

    def bent(curve: Curve) -> Curve:
        middle = curve.points[len(curve.points) // 2][0]
        power = math.log(factor)
        return Curve(tuple((x, y * (x / middle) ** power) for x, y in curve.points))

    layers = tuple(
        dataclasses.replace(layer, seconds={k: bent(curve) for k, curve in layer.seconds.items()})
        for layer in figures.layers
    )
    return dataclasses.replace(figures, layers=layers)


def _bends(figures: Figures) -> bool:
    return any(len(c.points) > 1 for layer in figures.layers for c in layer.seconds.values())


def _number(name: str) -> tuple[Callable[[Figures], bool], Callable[[Figures, float], Figures]]:
    def moved(figures: Figures, factor: float) -> Figures:
        return dataclasses.replace(figures, **{name: getattr(figures, name) * factor})

    return lambda figures: bool(getattr(figures, name)), moved


def _latency(figures: Figures, factor: float) -> Figures:
    link = figures.transfer
    return dataclasses.replace(figures, transfer=Link(link.latency * factor, link.bandwidth))


def _bandwidth(figures: Figures, factor: float) -> Figures:
    link = figures.transfer
    return dataclasses.replace(figures, transfer=Link(link.latency, link.bandwidth / factor))


# By name whether figures have something to move, how it is moved, and how much it costs.
_FACTORS: dict[
    str, tuple[Callable[[Figures], bool], Callable[[Figures, float], Figures], float]
] = {
    "layers": (lambda figures: True, _layers, _TRUST),
    "bend": (_bends, _bend, _TRUST),
    "action": (*_number("action"), 0.2 * _TRUST),
    "cores": (*_number("cores"), _TRUST),
    "fixed": (*_number("fixed"), _GUESS),
    "update": (*_number("update"), _GUESS),
    "bandwidth": (lambda figures: figures.transfer.bandwidth < math.inf, _bandwidth, _GUESS),
    "latency": (lambda figures: figures.transfer.latency > 0, _latency, _GUESS),
}


def _moved(figures: Figures, factors: dict[str, float]) -> Figures:
    for name, factor in factors.items():
        figures = _FACTORS[name][1](figures, math.exp(factor))
    return figures
