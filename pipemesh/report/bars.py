"""Bars on one scale: each row in parts side by side, or each part from where the last one ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipemesh.report.scale import Scale
from pipemesh.schedule.render.axis import ticks
from pipemesh.schedule.render.palette import AXIS_LINE, INK_TEXT, MUTED_TEXT, PAPER
from pipemesh.schedule.render.svg import escape

WIDTH = 1200
_LEFT, _RIGHT, _TOP, _BOTTOM = 170, 150, 60, 40
_ROW, _GAP = 22, 6
_FONT = "font-family=\"'DejaVu Sans', Verdana, Arial, sans-serif\""
_CHARACTER = 6.8

Row = tuple[str, Sequence[tuple[int, float]], str]
"""The name of a row; the look and the length of each of its parts; what stands behind it."""


def bars(
    title: str,
    rows: Sequence[Row],
    names: Sequence[str],
    *,
    text: Callable[[float], str],
    falling: bool = False,
) -> str:
    """Draws rows of bars.

    Args:
        title: a heading.
        rows: from the top down.
        names: of the looks, for the legend; "" for one that needs none.
        text: writes a value.
        falling: whether a row begins where the one before it ended, and not at 0.

    Returns:
        An SVG element, to be put into a page that has `chart.STYLE`.

    Example:
        >>> svg = bars("memory", [("CPU:0", [(0, 3.0), (1, 1.0)], "4 B")], ["weights", "sums"],
        ...            text="{:g} B".format)
        >>> svg.count("<rect")
        4
    """
    begins: list[float] = []
    ends: list[float] = []
    end = 0.0
    for _, parts, _ in rows:
        begins.append(end if falling else 0.0)
        end = begins[-1] + sum(length for _, length in parts)
        ends.append(end)
    scale = Scale.of([*begins, *ends], from_zero=True)
    plot = WIDTH - _LEFT - _RIGHT

    def x_of(value: float) -> float:
        return _LEFT + plot * scale.share(value)

    floor = _TOP + len(rows) * (_ROW + _GAP)
    height = floor + _BOTTOM
    told = "; ".join(f"{name}: {behind}" for name, _, behind in rows)
    found = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}' {_FONT} font-size='11' role='img' "
        f"aria-label='{escape(title)}: {escape(told)}'>",
        f"<title>{escape(title)}</title><desc>{escape(told)}</desc>",
        f"<text {INK_TEXT} x='10' y='20' font-size='14' font-weight='bold'>{escape(title)}</text>",
    ]
    x = float(_LEFT)
    for look, name in enumerate(names):
        if name:
            found += [
                f"<rect class='f{look}' x='{x:.1f}' y='32' width='12' height='12'/>",
                f"<text {INK_TEXT} x='{x + 17:.1f}' y='42'>{escape(name)}</text>",
            ]
            x += 17 + _CHARACTER * len(name) + 18
    for number, (name, parts, behind) in enumerate(rows):
        y = _TOP + number * (_ROW + _GAP)
        found.append(
            f"<text {INK_TEXT} x='{_LEFT - 8}' y='{y + _ROW / 2}' text-anchor='end' "
            f"dominant-baseline='central'>{escape(name)}</text>"
        )
        at = begins[number]
        for look, length in parts:
            left, right = sorted((x_of(at), x_of(at + length)))
            found.append(
                f"<rect class='cell f{look}' x='{left:.1f}' y='{y}' width='{right - left:.1f}' "
                f"height='{_ROW}' stroke='{PAPER}'><title>{escape(name)}"
                f"{', ' + escape(names[look]) if look < len(names) and names[look] else ''}: "
                f"{escape(text(length))}</title></rect>"
            )
            at += length
        furthest = max(x_of(begins[number]), x_of(at))
        found.append(
            f"<text {INK_TEXT} x='{furthest + 8:.1f}' y='{y + _ROW / 2}' "
            f"dominant-baseline='central'>{escape(behind)}</text>"
        )
    found.append(f"<line {AXIS_LINE} x1='{_LEFT}' y1='{floor}' x2='{_LEFT + plot}' y2='{floor}'/>")
    for value in ticks(scale.high, 8):
        found += [
            f"<line {AXIS_LINE} x1='{x_of(value):.1f}' y1='{floor}' x2='{x_of(value):.1f}' "
            f"y2='{floor + 4}'/>",
            f"<text {MUTED_TEXT} x='{x_of(value):.1f}' y='{floor + 16}' text-anchor='middle'>"
            f"{escape(text(value))}</text>",
        ]
    return "\n".join([*found, "</svg>"])
