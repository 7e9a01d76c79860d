"""Adjustment of figures until forecasts agree with measured steps."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan.figures import Curve, Figures, LayerFigures
from pipemesh.plan.network import Link
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict

# The cost of a factor of e between old and new figures, relative to errors of steps. It is high for
# figures that were measured themselves, low for ones from differences, and almost 0 for guesses.
_TRUST, _LITTLE, _GUESS = 0.2, 0.02, 0.001
# The smallest share that remains of a layer's time for some rows, whatever its fixed cost.
_LEAST = 0.2
# Step of the factors for finite differences.
_STEP = 0.01
# Most of the way from 0 to 1 counts as a factor of e, as for links.
_WIDE = 4
# Relative spread of a step's times at which the step counts half.
_STEADY = 0.05


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured step."""

    plan: Plan
    batch: int  # rows
    seconds: float
    # `seconds` is the work of all cores, `Prediction.work`, which other programs disturb less than
    # the clock.
    is_work: bool = False
    # Relative spread of the measured times; a larger one gives the step less weight.
    spread: float = 0.0
    # Numbers of the layers that the model had, which the plan cuts; None for all.
    layers: tuple[int, ...] | None = None

    def forecast(self, figures: Figures) -> Prediction:
        """Returns what figures of all layers say of the step."""
        had = figures if self.layers is None else figures.of_layers(self.layers)
        return predict(self.plan, had, self.batch, parts=False)


def fitted(figures: Figures, steps: Sequence[Measured]) -> Figures:
    """Returns the figures, adjusted until forecasts agree with measured steps."""
    # Values that cannot be measured alone are free: bandwidths, and the crowding of cores. Measured
    # values may change too, at a higher cost. These are the overhead of actions and steps, the
    # update, one factor each for the time, work and fixed cost of all layers, and the number of
    # cores. The objective is the sum of squared logarithms of errors, with a small weight on
    # staying near the given figures. Values that are 0, infinite or None stay. SciPy is slow to
    # import, so only this function imports it.
    optimize: Any = importlib.import_module("scipy.optimize")

    for step in steps:
        if not (step.seconds > 0 and math.isfinite(step.seconds)):
            raise PlanError(f"'{step.plan}' took {step.seconds} seconds; it must be above 0")
    names = [name for name, (is_there, _, _) in _FACTORS.items() if is_there(figures)]
    # A step may have both a measured time and measured work.
    measured = {(step.plan, step.batch, step.layers): step for step in steps}

    def apart(factors: Sequence[float]) -> list[float]:
        """Returns the logarithms of all factors and of the errors of forecasts."""
        moved_figures = _moved(figures, dict(zip(names, factors, strict=True)))
        residuals = [
            math.sqrt(_FACTORS[name][2]) * factor
            for name, factor in zip(names, factors, strict=True)
        ]
        forecasts = {key: step.forecast(moved_figures) for key, step in measured.items()}
        for step in steps:
            forecast = forecasts[step.plan, step.batch, step.layers]
            sure = 1 / math.hypot(1, step.spread / _STEADY)
            seconds = forecast.work if step.is_work else forecast.seconds
            residuals.append(sure * math.log(seconds / step.seconds))
        return residuals

    # The order of two actions depends on their durations, so step times have kinks.
    try:
        best = optimize.least_squares(apart, [0.0] * len(names), diff_step=_STEP, xtol=_STEP / 10)
    except PlanError:
        raise
    except PipemeshError as error:
        raise PlanError(str(error)) from error
    return _moved(figures, dict(zip(names, map(float, best.x), strict=True)))


def _layers(figures: Figures, factor: float) -> Figures:
    layers = tuple(layer.faster(1 / factor) for layer in figures.layers)
    return dataclasses.replace(figures, layers=layers)


def _curves(figures: Figures, moved: Callable[[Curve], Curve], names: Sequence[str]) -> Figures:
    """Returns figures with moved curves of their layers."""

    def of(layer: LayerFigures) -> LayerFigures:
        every = {name: {k: moved(c) for k, c in getattr(layer, name).items()} for name in names}
        return dataclasses.replace(layer, **every)

    return dataclasses.replace(figures, layers=tuple(map(of, figures.layers)))


def _start(names: Sequence[str]) -> Callable[[Figures, float], Figures]:
    """Returns a factor of the fixed cost of layers: the value of their first line at 0 rows."""

    def moved(curve: Curve, factor: float) -> Curve:
        if len(curve.points) == 1:
            return curve
        (x, y), (end, then) = curve.points[:2]
        # If the line falls by chance, all of its beginning is the fixed cost.
        more = (factor - 1) * min(y, max(0.0, y - (then - y) / (end - x) * x))
        return Curve(
            tuple((rows, max(value + more, _LEAST * value)) for rows, value in curve.points)
        )

    return lambda figures, factor: _curves(figures, lambda curve: moved(curve, factor), names)


def _work(figures: Figures, factor: float) -> Figures:
    """Scales the number of cores that layers keep busy."""
    return _curves(figures, lambda curve: curve.scaled(factor), ("work",))


def _crowding(figures: Figures, factor: float) -> Figures:
    """Scales the odds of crowding, so that it stays between 0 and 1."""
    odds = figures.crowding / (1 - figures.crowding) * factor**_WIDE
    return dataclasses.replace(figures, crowding=odds / (1 + odds))


def _starts(name: str) -> Callable[[Figures], bool]:
    """Returns a test whether curves of a name have points for both few and many rows."""

    def found(figures: Figures) -> bool:
        curves = [c for layer in figures.layers for c in getattr(layer, name).values()]
        return any(len(curve.points) > 1 for curve in curves)

    return found


def _number(name: str) -> tuple[Callable[[Figures], bool], Callable[[Figures, float], Figures]]:
    def moved(figures: Figures, factor: float) -> Figures:
        return dataclasses.replace(figures, **{name: getattr(figures, name) * factor})

    return lambda figures: bool(getattr(figures, name)), moved


def _link(
    name: str, part: str
) -> tuple[Callable[[Figures], bool], Callable[[Figures, float], Figures], float]:
    """Returns the factor of a link's latency or bandwidth, and the cost of a change."""

    def seconds(link: Link | None) -> float:
        return 0.0 if link is None else link.latency if part == "latency" else 1 / link.bandwidth

    def moved(figures: Figures, factor: float) -> Figures:
        link: Link = getattr(figures, name)
        if part == "latency":
            link = Link(link.latency * factor, link.bandwidth)
        else:
            link = Link(link.latency, link.bandwidth / factor)
        return dataclasses.replace(figures, **{name: link})

    # Steps hardly tell latency from work that no rule splits. One that is fitted too long makes
    # rules with three times the calls far too slow.
    cost = _LITTLE if part == "latency" else _GUESS
    return lambda figures: seconds(getattr(figures, name)) > 0, moved, cost


# By name: whether figures have the value, a function that changes it, and the cost of a change.
_FACTORS: dict[
    str, tuple[Callable[[Figures], bool], Callable[[Figures, float], Figures], float]
] = {
    "layers": (lambda figures: True, _layers, _TRUST),
    # It includes the clock's stamps and, on one core, the work of other threads.
    "start of seconds": (_starts("seconds"), _start(("seconds",)), _LITTLE),
    "start of work": (_starts("work"), _start(("work",)), _LITTLE),
    "work": (lambda figures: any(layer.work for layer in figures.layers), _work, _TRUST),
    "action": (*_number("action"), _TRUST),
    "cores": (*_number("cores"), _TRUST),
    "fixed": (*_number("fixed"), _TRUST),
    "update": (*_number("update"), _TRUST),
    **{
        f"{name} {part}": _link(name, part)
        for name in ("transfer", "sums")
        for part in ("latency", "bandwidth")
    },
    "crowding": (lambda figures: 0 < figures.crowding < 1, _crowding, _GUESS),
}


def _moved(figures: Figures, factors: dict[str, float]) -> Figures:
    for name, factor in factors.items():
        figures = _FACTORS[name][1](figures, math.exp(factor))
    return figures
