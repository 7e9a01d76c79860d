"""A time axis: its scale, and round numbers on it."""

from __future__ import annotations

import math
from collections.abc import Iterable


def scale_for(cells: Iterable[tuple[float, float]], negligible: float = 0.05) -> float:
    """The least scale at which cells have room for their text, but for the briefest ones.

    What is measured has actions of a hundredth of the others' duration; if their text had to fit, a
    drawing would be a hundred times as wide.

    Args:
        cells: for each the room that its text takes, and its duration.
        negligible: the share of the time that the cells without room for their text may take.

    Returns:
        Room for each unit of time; 0 if nothing takes time.

    Example:
        >>> scale_for([(24, 2.0), (24, 3.0), (24, 0.01)])
        12.0
    """
    wishes = sorted(((room / time, time) for room, time in cells if time > 0), reverse=True)
    most = negligible * sum(time for _, time in wishes)
    passed = 0.0
    for wish, time in wishes:
        passed += time
        if passed > most:
            return wish
    return 0.0


def ticks(end: float, at_most: int) -> list[float]:
    """Round times from 0 to `end`.

    Args:
        end: the last time, in any unit.
        at_most: how many steps there may be, at least 1.

    Returns:
        Ascending times in steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(33, 8)
        [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if end <= 0:
        return [0.0]
    rough = end / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def number(value: float) -> str:
    """A number with at most four significant digits and no trailing zeros.

    Example:
        >>> number(33.0), number(0.123456), number(123456.0)
        ('33', '0.1235', '123456')
    """
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}"
