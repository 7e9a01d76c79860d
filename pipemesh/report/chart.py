"""Curves as a picture: values by step, each with the range that it varies in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pipemesh.report.scale import Scale, short
from pipemesh.schedule.render.palette import AXIS_LINE, GRID, INK_TEXT, MUTED_TEXT
from pipemesh.schedule.render.svg import escape

WIDTH, HEIGHT = 590, 310
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 56, 44
_FONT = "font-family=\"'DejaVu Sans', Verdana, Arial, sans-serif\""
# Steps that are drawn one by one; more are drawn as means of as many parts.
_MOST = 500
# A curve of no more points has a mark at each.
_FEW = 40
_CHARACTER = 6.8

# In light surroundings, and in the dark: from the palette of Okabe and Ito, darker and lighter.
_COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#c14f00", "#ff9a52"),
    ("#00795a", "#2bc99a"),
    ("#a3447f", "#e29bc4"),
    ("#6b5b00", "#f0e442"),
    ("#444444", "#cccccc"),
)
# Nothing depends on colour alone.
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
MOST_RUNS = len(_COLOURS)


def _colours(which: int) -> str:
    return "\n".join(
        f".s{look} {{ stroke: {both[which]} }} .f{look} {{ fill: {both[which]} }}"
        for look, both in enumerate(_COLOURS)
    )


STYLE = f"{_colours(0)}\n@media (prefers-color-scheme: dark) {{\n{_colours(1)}\n}}"
"""What a page with these pictures needs in its style."""


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: what it is called beside others.
        points: a value by step, rising; None breaks the curve.
        look: a number below `MOST_RUNS`: its colour and its dashes.
        marks: whether its points are drawn, and no line between them.
    """

    name: str
    points: Sequence[tuple[int, float | None]]
    look: int = 0
    marks: bool = False

    @property
    def values(self) -> list[float]:
        """Those that are numbers."""
        return [value for _, value in self.points if value is not None]

    def told(self) -> str:
        """Its first, last and lowest value, for those who do not see it."""
        known = [(step, value) for step, value in self.points if value is not None]
        if not known:
            return f"{self.name}: no finite value"
        (first, begin), (last, end) = known[0], known[-1]
        if len(known) == 1:
            return f"{self.name}: {short(end)} at step {last:,}"
        step, lowest = min(known, key=lambda point: point[1])
        return (
            f"{self.name}: {short(begin)} at step {first:,}, {short(end)} at step {last:,}, "
            f"lowest {short(lowest)} at step {step:,}"
        )


def chart(
    title: str,
    series: Sequence[Series],
    *,
    until: int,
    notes: Sequence[tuple[int, str]] = (),
    scale: Scale | None = None,
) -> str:
    """Draws curves over the steps from 0 on.

    Args:
        title: a heading.
        series: at least one.
        until: the step where the axis ends.
        notes: steps to be marked by a line, each with a word for it.
        scale: of the values; by default the one that shows them best.

    Returns:
        An SVG element, to be put into a page that has `STYLE`.

    Example:
        >>> svg = chart("loss", [Series("training", [(1, 2.0), (2, 1.0)])], until=2)
        >>> "training: 2 at step 1, 1 at step 2, lowest 1 at step 2" in svg
        True
    """
    scale = scale or Scale.of(value for each in series for value in each.values)
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    floor = _TOP + high
    steps = Scale(0.0, float(max(1, until)))

    def x_of(step: float) -> float:
        return _LEFT + wide * steps.share(step)

    def y_of(value: float) -> float:
        return floor - high * min(1.0, max(0.0, scale.share(value)))

    told = "; ".join(each.told() for each in series)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        f"viewBox='0 0 {WIDTH} {HEIGHT}' {_FONT} font-size='11' role='img' "
        f"aria-label='{escape(title)}: {escape(told)}'>",
        f"<title>{escape(title)}</title><desc>{escape(told)}</desc>",
        f"<text {INK_TEXT} x='10' y='20' font-size='14' font-weight='bold'>{escape(title)}</text>",
    ]
    for value in scale.ticks(6):
        y = y_of(value)
        parts += [
            f"<line class='grid' x1='{_LEFT}' y1='{y:.1f}' x2='{WIDTH - _RIGHT}' y2='{y:.1f}' "
            f"stroke='{GRID}'/>",
            f"<text {MUTED_TEXT} x='{_LEFT - 8}' y='{y:.1f}' text-anchor='end' "
            f"dominant-baseline='central'>{short(value)}</text>",
        ]
    parts.append(
        f"<line {AXIS_LINE} x1='{_LEFT}' y1='{floor}' x2='{WIDTH - _RIGHT}' y2='{floor}'/>"
    )
    for value in steps.ticks(7):
        if value != int(value):
            continue
        x = x_of(value)
        parts += [
            f"<line {AXIS_LINE} x1='{x:.1f}' y1='{floor}' x2='{x:.1f}' y2='{floor + 4}'/>",
            f"<text {MUTED_TEXT} x='{x:.1f}' y='{floor + 16}' text-anchor='middle'>"
            f"{short(value)}</text>",
        ]
    parts.append(
        f"<text {MUTED_TEXT} x='{_LEFT}' y='{floor + 34}'>step"
        f"{'; values on a logarithmic scale' if scale.logarithmic else ''}</text>"
    )
    for step, word in notes:
        x = x_of(step)
        parts.append(
            f"<line {AXIS_LINE} x1='{x:.1f}' y1='{_TOP}' x2='{x:.1f}' y2='{floor}' "
            f"stroke-dasharray='3 3'><title>{escape(word)} at step {step:,}</title></line>"
        )
    for each in series:
        parts += _drawn(each, x_of, y_of)
    return "\n".join([*parts, *_legend(series, notes), "</svg>"])


def _drawn(
    series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> list[str]:
    """A curve, with the range of its values where it is a mean of them."""
    look = series.look
    if series.marks:
        return [
            f"<circle class='s{look}' cx='{x_of(step):.1f}' cy='{y_of(value):.1f}' r='5' "
            f"fill='none' stroke-width='2'><title>{escape(series.name)}, step {step:,}: "
            f"{short(value)}</title></circle>"
            for step, value in series.points
            if value is not None
        ]
    found: list[str] = []
    dash = f" stroke-dasharray='{_DASHES[look]}'" if _DASHES[look] else ""
    for piece in _pieces(thinned(series.points)):
        upper = [f"{x_of(step):.1f} {y_of(most):.1f}" for step, _, _, most in piece]
        lower = [f"{x_of(step):.1f} {y_of(least):.1f}" for step, _, least, _ in piece]
        if any(least < most for _, _, least, most in piece):
            found.append(
                f"<path class='f{look}' fill-opacity='0.18' "
                f"d='M{' L'.join([*upper, *reversed(lower)])}Z'/>"
            )
        line = [f"{x_of(step):.1f} {y_of(mean):.1f}" for step, mean, _, _ in piece]
        if len(line) > 1:
            found.append(
                f"<path class='s{look}' fill='none' stroke-width='1.8' stroke-linejoin='round'"
                f"{dash} d='M{' L'.join(line)}'/>"
            )
        if len(series.points) <= _FEW or len(line) == 1:
            found += [
                f"<circle class='f{look}' cx='{place.split()[0]}' cy='{place.split()[1]}' r='2.6'>"
                f"<title>{escape(series.name)}, step {step:,.0f}: {short(mean)}</title></circle>"
                for place, (step, mean, _, _) in zip(line, piece, strict=True)
            ]
    return found


Mean = tuple[float, float, float, float]
"""A step, and the mean, the least and the largest of the values around it."""


def thinned(points: Sequence[tuple[int, float | None]], most: int = _MOST) -> list[Mean | None]:
    """Points that a picture has room for.

    Args:
        points: a value by step, rising.
        most: how many there may be.

    Returns:
        Means of parts of equal length, None where no value of a part is a number.

    Example:
        >>> thinned([(1, 1.0), (2, 3.0), (3, None), (4, None)], most=2)
        [(1.5, 2.0, 1.0, 3.0), None]
    """
    size = max(1, math.ceil(len(points) / most))
    found: list[Mean | None] = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        values = [value for _, value in part if value is not None]
        step = (part[0][0] + part[-1][0]) / 2
        # Divided first: a sum may be beyond what a float holds.
        mean = math.fsum(value / len(values) for value in values)
        found.append((step, mean, min(values), max(values)) if values else None)
    return found


def _pieces(points: Sequence[Mean | None]) -> list[list[Mean]]:
    """Runs of points without a gap."""
    found: list[list[Mean]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [piece for piece in found if piece]


def _legend(series: Sequence[Series], notes: Sequence[tuple[int, str]]) -> list[str]:
    """Names of the curves, and of the lines across."""
    parts: list[str] = []
    x = float(_LEFT)
    lines = {each.look for each in series if not each.marks}
    for each in series:
        look = each.look
        if each.marks and look in lines:
            # Its colour is that of its line.
            continue
        if each.marks:
            sign = (
                f"<circle class='s{look}' cx='{x + 10:.1f}' cy='37' r='5' fill='none' "
                "stroke-width='2'/>"
            )
        else:
            dash = f" stroke-dasharray='{_DASHES[look]}'" if _DASHES[look] else ""
            sign = (
                f"<line class='s{look}' x1='{x:.1f}' y1='37' x2='{x + 22:.1f}' y2='37' "
                f"stroke-width='2.2'{dash}/>"
            )
        parts += [sign, f"<text {INK_TEXT} x='{x + 27:.1f}' y='41'>{escape(each.name)}</text>"]
        x += 27 + _CHARACTER * len(each.name) + 18
    for word in dict.fromkeys(word for _, word in notes):
        parts += [
            f"<line {AXIS_LINE} x1='{x + 4:.1f}' y1='30' x2='{x + 4:.1f}' y2='44' "
            "stroke-dasharray='3 3'/>",
            f"<text {MUTED_TEXT} x='{x + 12:.1f}' y='41'>{escape(word)}</text>",
        ]
        x += 12 + _CHARACTER * len(word) + 18
    return parts
