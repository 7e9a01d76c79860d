"""A scale for values: from where to where, in even steps or in powers, and round numbers on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from pipemesh.schedule.render.axis import number, ticks

# Beyond this ratio even steps show one end alone.
_RATIO = 20.0


@dataclasses.dataclass(frozen=True)
class Scale:
    """From the lowest to the highest value.

    Attributes:
        low: the lowest value.
        high: the highest, above it.
        logarithmic: whether equal ratios take equal room.

    Example:
        >>> scale = Scale.of([1.0, 1000.0])
        >>> scale.logarithmic, round(scale.share(31.6), 2), scale.ticks(5)
        (True, 0.5, [1.0, 10.0, 100.0, 1000.0])
    """

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def of(cls, values: Iterable[float], from_zero: bool = False) -> Scale:
        """The scale that shows values best.

        Args:
            values: finite; there may be none.
            from_zero: whether it is to begin at 0, in even steps.
        """
        found = list(values)
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if from_zero:
            return cls(min(0.0, low), high if high > 0 else 1.0)
        if low > 0 and high / low > _RATIO:
            return cls(low, high, logarithmic=True)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - room if low < 0 or low - room > 0 else 0.0, high + room)

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the lowest to 1 at the highest."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, at_most: int) -> list[float]:
        """Round values, rising.

        Args:
            at_most: how many, nearly.
        """
        if not self.logarithmic:
            step = (*ticks(self.high - self.low, at_most), self.high - self.low)[1]
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            return [index * step for index in range(first, last + 1)]
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        powers = [10.0**power for power in range(first, last + 1)]
        for factors in ((1, 2, 5), (1,)):
            found = [factor * power for power in powers for factor in factors]
            found = [v for v in found if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(found) <= at_most:
                break
        return found[:: -(-len(found) // at_most) or 1]


def called(name: str) -> str:
    """The name of a value for people.

    Example:
        >>> called("learning_rate"), called("mfu")
        ('learning rate', 'MFU')
    """
    return "MFU" if name == "mfu" else name.replace("_", " ")


def short(value: float | None) -> str:
    """A number as people read it.

    Example:
        >>> short(1234567.0), short(12345.6), short(0.00012345), short(2e30), short(None)
        ('1.235M', '12,346', '0.0001234', '2e+30', 'not finite')
    """
    if value is None or not math.isfinite(value):
        return "not finite"
    if 1e6 <= abs(value) < 1e12:
        power, letter = (9, "G") if abs(value) >= 1e9 else (6, "M")
        return f"{value / 10**power:.4g}{letter}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return number(value) if abs(value) < 1e12 else f"{value:.3g}"
