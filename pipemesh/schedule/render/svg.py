"""A schedule as a self-contained SVG picture."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.schedule.action import KINDS
from pipemesh.schedule.render.axis import number, scale_for, ticks
from pipemesh.schedule.render.palette import (
    AXIS_LINE,
    BAND,
    DARK_STYLE,
    INK_TEXT,
    MUTED_TEXT,
    NAMES,
    PAPER,
    fill,
    hexadecimal,
    ink,
    levels,
)
from pipemesh.schedule.timeline import Span, Timeline

LEFT = 78
RIGHT = 180
TOP = 64
ROW = 26
GAP = 4
BOTTOM = 44
WIDEST = 1500
_FONT = "font-family=\"'DejaVu Sans', Verdana, Arial, sans-serif\""
_CHARACTER = 6.6
"""Width of a character of the legend, in pixels, on the generous side."""

_NARROWEST = 24.0
"""Pixels of a cell that is not in need of more."""
_UPRIGHT = 13.0
"""Pixels of a cell whose text is turned by a quarter, so that it runs upwards."""
_HAIR = 1.0
"""Pixels that a brief action is widened to where nothing follows it closely."""

_PALER = "paler: a later stage of the device"


def to_svg(
    timeline: Timeline, *, title: str = "", scale: float | None = None, until: float | None = None
) -> str:
    """Draws one row a device over a time axis, with bubble and peak activations at its end.

    Hovering over a cell shows its stage, microbatch and times, wherever the viewer supports SVG
    titles. Where dark colours are preferred, it is dark.

    Args:
        timeline: what to draw.
        title: a heading; by default the counts.
        scale: pixels for each unit of time; by default `fitting_scale`.
        until: where the time axis ends; by default at the makespan. Pictures with the same scale
            and end can be compared.

    Returns:
        An SVG document that refers to nothing outside itself.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> to_svg(simulate(gpipe(2, 2))).count("<rect class='cell'")
        8
    """
    schedule = timeline.schedule
    scale = fitting_scale([timeline]) if scale is None else scale
    end = timeline.makespan if until is None else until
    plot = end * scale
    width = LEFT + plot + RIGHT
    height = TOP + schedule.num_devices * (ROW + GAP) + BOTTOM
    title = title or (
        f"{schedule.num_devices} devices, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
        + (f", {schedule.num_slices} slices" if schedule.num_slices > 1 else "")
    )
    kinds = sorted({a.kind for row in schedule.rows for a in row}, key=KINDS.index)
    looped = schedule.num_stages > schedule.num_devices
    legend_width = 14 + sum(_legend_width(kind) for kind in kinds)
    legend_width += _CHARACTER * len(_PALER) if looped else 0
    width = max(width, LEFT + legend_width, 18 + 9.0 * len(title))
    parts = [
        *header(width, height, title),
        *_legend(kinds, looped),
        f"<text {MUTED_TEXT} x='{LEFT + plot + 12:.1f}' y='{TOP - 8}'>bubble</text>",
        f"<text {MUTED_TEXT} x='{LEFT + plot + 96:.1f}' y='{TOP - 8}'>held at most</text>",
        *_rows(timeline, scale, plot),
        *_cells(timeline, scale),
        *names(
            [TOP + device * (ROW + GAP) + ROW / 2 for device in range(schedule.num_devices)], ROW
        ),
        *time_axis(timeline, scale, TOP + schedule.num_devices * (ROW + GAP), end),
        "</svg>\n",
    ]
    return "\n".join(parts)


def fitting_scale(
    timelines: Sequence[Timeline], *, width: float = WIDEST, widest: float = WIDEST
) -> float:
    """Pixels for each unit of time, one scale for all that is to be compared.

    As wide as it takes for the cells' text, but no wider than `width` as long as most cells have
    room for the number of their microbatch, nor than `widest` in any case. Brief actions do not
    count.

    Args:
        timelines: what is to be drawn.
        width: the pixels of a time axis that need no scrolling.
        widest: the most pixels of a time axis; a long schedule is squeezed into them.
    """
    spans = [span for timeline in timelines for span in timeline.spans()]
    end = max((timeline.makespan for timeline in timelines), default=0.0)
    if not end:
        return 1.0

    full = scale_for((max(_width(label_of(s)) + 6, _NARROWEST), s.end - s.start) for s in spans)
    numbers = scale_for(
        ((_number_room(s.action.piece_text), s.end - s.start) for s in spans), negligible=0.25
    )
    return min(full or 1.0, max(numbers, width / end), widest / end)


def label_of(span: Span) -> str:
    """What a cell shows: kind, microbatch and slice; the stage follows from row and shade."""
    return f"{span.action.kind}{span.action.piece_text}"


def _width(label: str) -> float:
    """Pixels that a label takes."""
    return sum(11.0 if character == "W" else 7.0 for character in label)


def _number_room(number: str) -> float:
    """Pixels of a cell that shows a number: a long one is turned."""
    across = _width(number) + 2
    return across if across <= _UPRIGHT + 3 or not _fits_upright(number) else _UPRIGHT


def _fits_upright(label: str) -> bool:
    return _width(label) <= ROW - 2


def describe(span: Span) -> str:
    """What hovering over a cell shows."""
    part = "" if span.action.slice is None else f", slice {span.action.slice}"
    return (
        f"{span.action}: {NAMES[span.action.kind]} of stage {span.action.stage}, "
        f"microbatch {span.action.microbatch}{part}; device {span.device}, "
        f"time {number(span.start)} to {number(span.end)}"
    )


def escape(text: str) -> str:
    """Text made safe inside XML and HTML, also inside quotes."""
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;")):
        text = text.replace(sign, entity)
    return text.replace('"', "&quot;")


def header(width: float, height: float, title: str) -> list[str]:
    """The opening tag, the background and the heading of a picture."""
    return [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {_FONT} font-size='11'>",
        f"<style>{DARK_STYLE}</style>",
        f"<rect class='paper' width='100%' height='100%' fill='{PAPER}'/>",
        f"<text {INK_TEXT} x='10' y='20' font-size='14' font-weight='bold'>{escape(title)}</text>",
    ]


def time_axis(timeline: Timeline, scale: float, y: float, end: float) -> list[str]:
    """Round times up to `end` under a plot that starts at x = `LEFT`, with its label."""
    plot = end * scale
    parts = [f"<line {AXIS_LINE} x1='{LEFT}' y1='{y}' x2='{LEFT + plot:.1f}' y2='{y}'/>"]
    for time in ticks(end, max(1, int(plot // 60))):
        x = LEFT + time * scale
        parts += [
            f"<line {AXIS_LINE} x1='{x:.1f}' y1='{y}' x2='{x:.1f}' y2='{y + 4}'/>",
            f"<text {MUTED_TEXT} x='{x:.1f}' y='{y + 16}' text-anchor='middle'>"
            f"{number(time)}</text>",
        ]
    parts.append(
        f"<text {MUTED_TEXT} x='{LEFT}' y='{y + 34}'>"
        f"time; makespan {number(timeline.makespan)}</text>"
    )
    return parts


def names(heights: Sequence[float], row: float) -> list[str]:
    """The names of the devices, left of the plot, in a group that a page can keep in view.

    Args:
        heights: for each device that of the middle of its row.
        row: how high rows are.
    """
    labels = [
        f"<text {INK_TEXT} x='{LEFT - 8}' y='{y:.1f}' text-anchor='end' "
        f"dominant-baseline='central'>device {device}</text>"
        for device, y in enumerate(heights)
    ]
    top = min(heights) - row / 2
    height = max(heights) + row / 2 - top
    paper = (
        f"<rect class='paper' x='0' y='{top:.1f}' width='{LEFT - 2}' height='{height:.1f}' "
        f"fill='{PAPER}'/>"
    )
    return ["<g class='names'>", paper, *labels, "</g>"]


def _legend_width(kind: str) -> float:
    return 30 + _CHARACTER * (len(NAMES[kind]) + 2)


def _legend(kinds: list[str], looped: bool) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    for kind in kinds:
        parts += [
            f"<rect x='{x:.1f}' y='31' width='12' height='12' fill='{hexadecimal(fill(kind))}'/>",
            f"<text {INK_TEXT} x='{x + 17:.1f}' y='41'>{kind} {NAMES[kind]}</text>",
        ]
        x += _legend_width(kind)
    if looped:
        parts.append(f"<text {MUTED_TEXT} x='{x:.1f}' y='41'>{_PALER}</text>")
    return parts


def _rows(timeline: Timeline, scale: float, plot: float) -> list[str]:
    parts: list[str] = []
    for device in range(timeline.schedule.num_devices):
        y = TOP + device * (ROW + GAP)
        bubble = timeline.bubble[device]
        share = bubble / timeline.makespan if timeline.makespan else 0.0
        # The band behind a row makes idle time visible as such.
        parts += [
            f"<rect class='band' x='{LEFT}' y='{y}' width='{timeline.makespan * scale:.1f}' "
            f"height='{ROW}' fill='{BAND}'/>",
            f"<text {INK_TEXT} x='{LEFT + plot + 12:.1f}' y='{y + ROW / 2}' "
            f"dominant-baseline='central'>{number(bubble)} ({share:.0%})</text>",
            f"<text {INK_TEXT} x='{LEFT + plot + 96:.1f}' y='{y + ROW / 2}' "
            f"dominant-baseline='central'>{timeline.peak_activations[device]}</text>",
        ]
    return parts


def _cells(timeline: Timeline, scale: float) -> list[str]:
    pale = levels(timeline.schedule.stage_devices)
    looks: dict[tuple[str, int], tuple[str, str]] = {}
    parts: list[str] = []
    for span in timeline.spans():
        action = span.action
        key = (action.kind, action.stage)
        if key not in looks:
            colour = fill(action.kind, pale[action.stage])
            looks[key] = (hexadecimal(colour), ink(colour))
        background, front = looks[key]
        x, y = LEFT + span.start * scale, TOP + span.device * (ROW + GAP)
        width = (span.end - span.start) * scale
        if width < _HAIR:
            width = max(width, min(_HAIR, _room(timeline, span) * scale))
        label = label_of(span)
        if _width(label) > width - 2:
            label = action.piece_text
        is_turned = _width(label) > width - 2
        parts.append(
            f"<g><rect class='cell' x='{x:.2f}' y='{y}' width='{width:.2f}' height='{ROW}' "
            f"fill='{background}' stroke='{PAPER}' stroke-width='{min(1.0, width / 8):.2f}'>"
            f"<title>{describe(span)}</title></rect>"
        )
        if not is_turned or (width >= _UPRIGHT and _fits_upright(label)):
            middle = f"{x + width / 2:.2f}", f"{y + ROW / 2}"
            turn = f"transform='rotate(-90 {' '.join(middle)})' " if is_turned else ""
            parts.append(
                f"<text x='{middle[0]}' y='{middle[1]}' {turn}text-anchor='middle' "
                f"dominant-baseline='central' fill='{front}' pointer-events='none'>{label}</text>"
            )
        parts.append("</g>")
    return parts


def _room(timeline: Timeline, span: Span) -> float:
    """The time until the next action of the device starts."""
    starts = timeline.starts[span.device]
    return (*starts, timeline.makespan)[span.tick + 1] - span.start
