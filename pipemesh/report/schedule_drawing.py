"""A timeline as an SVG picture, with a plot of the activations held, and both on a web page.

Cells are in the palette of Okabe and Ito, whose colours people with any common colour blindness can
tell apart. Later stages of a device are paler. Every cell also carries its kind as a letter
wherever there is room, so that no picture depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipemesh.report.html_page import document, section, table
from pipemesh.report.svg import (
    BAND,
    DARK_INK,
    DARK_PAPER,
    EDGE,
    GRID,
    INK,
    PAPER,
    Key,
    axis_below,
    element,
    legend,
    line,
    picture,
    rect,
    scale_for,
    swatch,
    text,
    text_width,
    ticks,
    tooltip,
)
from pipemesh.schedule import Timeline
from pipemesh.schedule.action import KINDS
from pipemesh.schedule.timeline import Span
from pipemesh.text import number

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recomputation",
}
ON_LINKS = {"G": "weights fetched", "S": "sum of gradients"}
"""Names of what links do, by the letter of their cells."""
_COLOURS = {
    "F": (0, 114, 178),
    "B": (213, 94, 0),
    "I": (230, 159, 0),
    "W": (0, 158, 115),
    "R": (86, 180, 233),
    "G": (204, 121, 167),
    "S": (240, 228, 66),
}
_PALEST = 0.6

LEFT, RIGHT = 78, 180
_TOP, _ROW, _GAP, _BOTTOM = 64, 26, 4, 44
_WIDEST = 1500
# Pixels of a cell that is not in need of more.
_NARROWEST = 24.0
# Pixels of a cell whose text is turned by a quarter, so that it runs upwards.
_UPRIGHT = 13.0
# Pixels that a brief action is widened to where nothing follows it closely.
_HAIR = 1.0
_PALER = "paler: a later stage of the device"

_PANEL, _PANEL_GAP, _PANEL_TOP, _PANEL_RIGHT = 46, 10, 50, 90
_HELD = "#cc79a7"


def fill(kind: str, level: float = 0.0) -> tuple[int, int, int]:
    """Returns the colour of a kind of cell, at level 0 the full one, at 1 the palest."""
    share = level * _PALEST
    red, green, blue = (round(c + (255 - c) * share) for c in _COLOURS[kind])
    return red, green, blue


def ink(background: tuple[int, int, int]) -> str:
    """Returns black or white, whichever has more contrast (WCAG relative luminance)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (part / 255 for part in background)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Equal contrast (L + 0.05) / 0.05 = 1.05 / (L + 0.05) is at L = 0.179.
    return "#000000" if luminance > 0.179 else "#ffffff"


def hexadecimal(colour: tuple[int, int, int]) -> str:
    """Writes red, green and blue as a web colour."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def levels(stage_devices: tuple[int, ...]) -> tuple[float, ...]:
    """Returns how pale each stage is: 0 for the first stage of a device, 1 for the last of many."""
    order = [stage_devices[:stage].count(device) for stage, device in enumerate(stage_devices)]
    most = max(order, default=0)
    return tuple(index / most if most else 0.0 for index in order)


def to_svg(
    timeline: Timeline, *, title: str = "", scale: float | None = None, until: float | None = None
) -> str:
    """Draws one row for each device over a time axis, with its bubble and peak activations.

    Fetches of weights and sums of gradients have rows of their own below, one for the link of each
    device.

    Hovering over a cell shows its stage, microbatch and times in viewers that support SVG titles.
    The picture is dark where dark colours are preferred.

    Args:
        timeline: the timeline to draw.
        title: the heading; by default the counts.
        scale: pixels for each unit of time; by default so many that the text of cells fits.
        until: the end of the time axis; by default that of the timeline. Pictures with the same
            scale and end can be compared.

    Returns:
        An SVG document that refers to nothing outside itself.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> to_svg(simulate(gpipe(2, 2))).count("<rect class='cell'")
        8
    """
    schedule = timeline.schedule
    scale = fitting_scale([timeline]) if scale is None else scale
    end = timeline.end if until is None else until
    plot = end * scale
    links = timeline.links
    rows = [f"device {device}" for device in range(schedule.num_devices)]
    rows += [f"link {device}" for device in links]
    title = title or (
        f"{schedule.num_devices} devices, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
        + (f", {schedule.num_slices} slices" if schedule.num_slices > 1 else "")
    )
    kinds = sorted({a.kind for row in schedule.rows for a in row}, key=KINDS.index)
    keys = [swatch(f"{kind} {NAMES[kind]}", fill=hexadecimal(fill(kind))) for kind in kinds]
    on_links = {each.kind for each in timeline.link_spans}
    keys += [
        swatch(f"{kind} {name}", fill=hexadecimal(fill(kind)))
        for kind, name in ON_LINKS.items()
        if kind in on_links
    ]
    if schedule.num_stages > schedule.num_devices:
        keys.append(Key(_PALER, lambda x, y: "", 0, is_muted=True))
    width = max(LEFT + plot + RIGHT, LEFT + sum(key.width for key in keys), 18 + 9.0 * len(title))
    floor = _TOP + len(rows) * (_ROW + _GAP)
    parts = [
        *legend(keys, LEFT, width)[0],
        text(LEFT + plot + 12, _TOP - 8, "bubble", is_muted=True),
        text(LEFT + plot + 96, _TOP - 8, "held at most", is_muted=True),
        *_rows(timeline, scale, plot),
        *_cells(timeline, scale),
        *_link_cells(timeline, scale, links),
        *_names({row: _TOP + i * (_ROW + _GAP) + _ROW / 2 for i, row in enumerate(rows)}, _ROW),
        *_time_axis(timeline, scale, floor, end),
    ]
    return picture(width, floor + _BOTTOM, title, parts)


def fitting_scale(
    timelines: Sequence[Timeline], *, width: float = _WIDEST, widest: float = _WIDEST
) -> float:
    """Returns pixels for each unit of time, one scale for all timelines."""
    # The axis is as wide as the cells' text needs, but no wider than `width` as long as most cells
    # have room for the number of their microbatch, nor than `widest` in any case. Brief actions do
    # not count.
    spans = [span for timeline in timelines for span in timeline.spans()]
    end = max((timeline.end for timeline in timelines), default=0.0)
    if not end:
        return 1.0

    full = scale_for((max(text_width(_label(s)) + 6, _NARROWEST), s.end - s.start) for s in spans)
    numbers = scale_for(
        ((_number_room(s.action.piece_text), s.end - s.start) for s in spans), negligible=0.25
    )
    return min(full or 1.0, max(numbers, width / end), widest / end)


def _label(span: Span) -> str:
    """Returns kind, microbatch and slice; the stage follows from row and shade."""
    return f"{span.action.kind}{span.action.piece_text}"


def _number_room(number: str) -> float:
    """Returns the pixels of a cell that shows a number: a long one is turned."""
    across = text_width(number) + 2
    return across if across <= _UPRIGHT + 3 or not _fits_upright(number) else _UPRIGHT


def _fits_upright(label: str) -> bool:
    return text_width(label) <= _ROW - 2


def _described(span: Span) -> str:
    """Returns the text that hovering over a cell shows."""
    part = "" if span.action.slice is None else f", slice {span.action.slice}"
    return (
        f"{span.action}: {NAMES[span.action.kind]} of stage {span.action.stage}, "
        f"microbatch {span.action.microbatch}{part}; device {span.device}, "
        f"time {number(span.start)} to {number(span.end)}"
    )


def _time_axis(timeline: Timeline, scale: float, y: float, end: float) -> list[str]:
    """Draws round times up to `end` under a plot, and the makespan."""
    times = ticks(end, max(1, int(end * scale // 60)))
    marks = [(LEFT + time * scale, number(time)) for time in times]
    label = f"time; makespan {number(timeline.makespan)}"
    return axis_below(y, LEFT, LEFT + end * scale, marks, label)


def _names(heights: Mapping[str, float], row: float) -> list[str]:
    """Draws the names of rows in the middle of these, as a group that stays in view."""
    labels = [text(LEFT - 8, y, name, anchor="end", is_central=True) for name, y in heights.items()]
    top = min(heights.values()) - row / 2
    height = max(heights.values()) + row / 2 - top
    paper = rect(0, top, LEFT - 2, height, class_="paper", fill=PAPER)
    return ["<g class='names'>", paper, *labels, "</g>"]


def _rows(timeline: Timeline, scale: float, plot: float) -> list[str]:
    """Draws a band behind each row, which makes idle time visible, and the numbers behind it."""
    parts: list[str] = []
    width = timeline.makespan * scale
    for device in range(timeline.schedule.num_devices):
        y = _TOP + device * (_ROW + _GAP)
        middle = y + _ROW / 2
        bubble = timeline.bubble[device]
        share = bubble / timeline.makespan if timeline.makespan else 0.0
        peak = str(timeline.peak_activations[device])
        parts += [
            rect(LEFT, y, width, _ROW, class_="band", fill=BAND),
            text(LEFT + plot + 12, middle, f"{number(bubble)} ({share:.0%})", is_central=True),
            text(LEFT + plot + 96, middle, peak, is_central=True),
        ]
    return parts


def _cells(timeline: Timeline, scale: float) -> list[str]:
    """Draws a cell for each action, with as much of its text as fits."""
    pale = levels(timeline.schedule.stage_devices)
    looks: dict[tuple[str, int], tuple[str, str]] = {}
    parts: list[str] = []
    for span in timeline.spans():
        action = span.action
        key = (action.kind, action.stage)
        if key not in looks:
            colour = fill(action.kind, pale[action.stage])
            looks[key] = (hexadecimal(colour), ink(colour))
        x, y = LEFT + span.start * scale, _TOP + span.device * (_ROW + _GAP)
        width = (span.end - span.start) * scale
        if width < _HAIR:
            next_start = (*timeline.starts[span.device], timeline.makespan)[span.tick + 1]
            width = max(width, min(_HAIR, (next_start - span.start) * scale))
        parts.append(
            _cell(x, y, width, _described(span), (_label(span), action.piece_text), looks[key])
        )
    return parts


def _cell(
    x: float, y: float, width: float, about: str, labels: Sequence[str], look: tuple[str, str]
) -> str:
    """Draws a cell with the first of its labels that fits, or the last one, turned if need be."""
    background, front = look
    colours = {"class_": "cell", "fill": background, "stroke": PAPER}
    edge = min(1.0, width / 8)
    cell = rect(x, y, width, _ROW, tooltip(about), **colours, stroke_width=edge)
    label = next((label for label in labels if text_width(label) <= width - 2), labels[-1])
    is_turned = text_width(label) > width - 2
    words = ""
    if not is_turned or (width >= _UPRIGHT and _fits_upright(label)):
        middle = x + width / 2, y + _ROW / 2
        turn = f"rotate(-90 {middle[0]:.2f} {middle[1]:g})" if is_turned else ""
        words = text(
            *middle,
            label,
            anchor="middle",
            is_central=True,
            class_="on-cell",
            fill=front,
            pointer_events="none",
            transform=turn,
        )
    return f"<g>{cell}{words}</g>"


def _link_cells(timeline: Timeline, scale: float, links: Sequence[int]) -> list[str]:
    """Draws a row for each link, with a cell for each of its spans."""
    tops = {
        link: _TOP + (timeline.schedule.num_devices + row) * (_ROW + _GAP)
        for row, link in enumerate(links)
    }
    width = timeline.end * scale
    parts = [rect(LEFT, y, width, _ROW, class_="band", fill=BAND) for y in tops.values()]
    what = {
        "G": "fetch of the weights of stage {} from its replicas",
        "S": "sum of the gradients of stage {} over its replicas",
    }
    for each in timeline.link_spans:
        x, y, width = LEFT + each.start * scale, tops[each.device], (each.end - each.start) * scale
        about = (
            f"{what[each.kind].format(each.stage)}; link of device {each.device}, "
            f"time {number(each.start)} to {number(each.end)}"
        )
        look = hexadecimal(fill(each.kind)), ink(fill(each.kind))
        labels = [f"{each.kind}{each.stage}", str(each.stage)]
        parts.append(_cell(x, y, width, about, labels, look))
    return parts


def memory_to_svg(
    timeline: Timeline, *, title: str = "", scale: float | None = None, until: float | None = None
) -> str:
    """Draws a small step curve for each device: the (stage, microbatch) pairs it holds.

    All panels share one vertical scale, so that devices can be compared.

    Args:
        timeline: the timeline to draw.
        title: the heading.
        scale: pixels for each unit of time; by default that of `to_svg`.
        until: the end of the time axis; by default that of the timeline.

    Returns:
        An SVG document that refers to nothing outside itself.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> memory_to_svg(simulate(gpipe(2, 2))).count("<path")
        2
    """
    scale = fitting_scale([timeline]) if scale is None else scale
    end = timeline.end if until is None else until
    num_devices = timeline.schedule.num_devices
    right = LEFT + end * scale
    title = title or "Activations held, in (stage, microbatch) pairs"
    top = max(timeline.peak_activations, default=0) or 1
    parts: list[str] = []
    for device in range(num_devices):
        floor = _PANEL_TOP + device * (_PANEL + _PANEL_GAP) + _PANEL
        peak = timeline.peak_activations[device]
        y_peak = floor - peak / top * _PANEL
        curve = element(
            "path",
            tooltip(f"device {device}: peak {peak}"),
            class_="held",
            d=_held_curve(timeline, device, scale, floor, _PANEL / top),
            fill=_HELD,
            fill_opacity="0.35",
            stroke=EDGE,
            stroke_width=1.2,
        )
        parts += [
            line(LEFT, floor, right, floor, class_="grid", stroke=GRID),
            curve,
            line(LEFT, y_peak, right, y_peak, stroke_dasharray="3 3"),
            text(right + 8, y_peak, f"peak {peak}", is_central=True),
        ]
    pitch = _PANEL + _PANEL_GAP
    bottom = _PANEL_TOP + num_devices * pitch
    middles = {f"device {d}": _PANEL_TOP + d * pitch + _PANEL / 2 for d in range(num_devices)}
    parts += _names(middles, pitch)
    parts += _time_axis(timeline, scale, bottom, end)
    return picture(max(right + _PANEL_RIGHT, 18 + 9.0 * len(title)), bottom + _BOTTOM, title, parts)


def _held_curve(timeline: Timeline, device: int, scale: float, floor: float, unit: float) -> str:
    """Returns the path of a step curve; `unit` is the height of one pair."""
    steps = [f"M{LEFT} {floor}"]
    for time, held in timeline.activations(device):
        steps.append(f"H{LEFT + time * scale:.1f}V{floor - held * unit:.1f}")
    return "".join([*steps, f"H{LEFT + timeline.makespan * scale:.1f}V{floor}Z"])


# A small screen shows the whole width, its margins and a scroll bar beside it.
_SCREEN = 1280 - 2 * 24 - 16 - LEFT - RIGHT
# But a page scrolls, so a long schedule may be wider.
_WIDEST_ON_PAGE = 12_000

_STYLE = f"""
body, p, svg {{ max-width: none; }}
/* The scroll bar of a picture that is wider than the screen stays in view. */
@media screen {{ .tall {{ overflow: auto; max-height: calc(100vh - 48px); }} }}
rect.cell:hover {{ stroke: #000; stroke-width: 2; }}
#tip {{ position: fixed; display: none; pointer-events: none; padding: 6px 9px; border-radius: 4px;
       font-size: 12px; max-width: 320px; z-index: 1; background: {INK}; color: {PAPER}; }}
@media (prefers-color-scheme: dark) {{
  rect.cell:hover {{ stroke: #fff; }}
  #tip {{ background: {DARK_INK}; color: {DARK_PAPER}; }}
}}
"""

# The browser's own tooltip comes late and cannot be styled: the script takes the titles out of the
# cells and shows their text in a box that stays inside the window.
_SCRIPT = """
const tip = document.getElementById('tip');
for (const shape of document.querySelectorAll('svg rect.cell, svg path')) {
  const title = shape.querySelector('title');
  if (!title) continue;
  shape.dataset.tip = title.textContent;
  shape.setAttribute('aria-label', title.textContent);
  title.remove();
}
// The names of the rows stay in view.
for (const box of document.querySelectorAll('.scroll')) {
  const names = box.querySelectorAll('g.names');
  box.addEventListener('scroll', () => {
    for (const group of names) group.setAttribute('transform', `translate(${box.scrollLeft} 0)`);
  });
}
document.addEventListener('pointermove', event => {
  const text = event.target.dataset && event.target.dataset.tip;
  if (!text) { tip.style.display = 'none'; return; }
  tip.textContent = text;
  tip.style.display = 'block';
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + 'px';
  const below = event.clientY + 18;
  const above = event.clientY - box.height - 8;
  tip.style.top = (below + box.height > innerHeight ? above : below) + 'px';
});
"""


def to_html(
    timeline: Timeline, *, title: str = "Pipeline schedule", measured: Timeline | None = None
) -> str:
    """Draws the schedule, the summary and the memory plot on one page.

    Hovering over a cell shows its stage, microbatch and times.

    Args:
        timeline: the timeline to draw.
        title: the heading of the page.
        measured: a real step in the same unit; drawn below the other, on the same scale.

    Returns:
        An HTML document that loads nothing from anywhere.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> to_html(simulate(gpipe(2, 2))).startswith("<!DOCTYPE html>")
        True
    """
    shown = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    # One scale and one end, so that what takes longer is longer.
    scale = fitting_scale(list(shown.values()), width=_SCREEN, widest=_WIDEST_ON_PAGE)
    until = max(drawn.end for drawn in shown.values())

    def sections(heading: str, draw: Callable[[Timeline], str]) -> list[str]:
        return [
            section(f"{heading}, {name}" if name else heading, draw(drawn))
            for name, drawn in shown.items()
        ]

    def path(drawn: Timeline) -> str:
        return f"<p>{' &rarr; '.join(str(span.action) for span in drawn.critical_path)}</p>"

    is_long = until * scale > _SCREEN
    return document(
        title,
        [
            _summary(shown),
            f'<div class="scroll{" tall" if is_long else ""}">',
            *sections("Timeline", lambda drawn: to_svg(drawn, scale=scale, until=until)),
            section(
                "Memory, predicted" if measured else "Memory",
                memory_to_svg(timeline, scale=scale, until=until),
            ),
            "</div>",
            *sections("Devices", _devices),
            *sections("Critical path", path),
            '<div id="tip" role="tooltip"></div>',
        ],
        style=_STYLE,
        script=_SCRIPT,
    )


_AFTER = "sums of gradients after it"


def _summary(shown: Mapping[str, Timeline]) -> str:
    """Returns a table with a column of facts for each timeline."""
    columns = [
        [
            name,
            str(timeline.schedule.num_devices),
            str(timeline.schedule.num_stages),
            str(timeline.schedule.num_microbatches),
            number(timeline.makespan),
            number(timeline.end - timeline.makespan) if timeline.sums else "",
            f"{number(timeline.total_bubble)} ({timeline.bubble_ratio:.1%})",
            number(max(timeline.own_span_bubble, default=0.0)),
            str(max(timeline.peak_activations, default=0)),
        ]
        for name, timeline in shown.items()
    ]
    names = (
        *("", "devices", "stages", "microbatches", "makespan", _AFTER),
        *("bubble, all devices", "largest own-span bubble", "peak activations"),
    )
    head, *rows = zip(names, *columns, strict=True)
    has_sums = any(timeline.sums for timeline in shown.values())
    return table(head, [row for row in rows if has_sums or row[0] != _AFTER])


def _devices(timeline: Timeline) -> str:
    """Returns a table with the numbers of each device."""
    rows = [
        [
            str(device),
            number(timeline.busy[device]),
            number(timeline.bubble[device]),
            number(timeline.own_span_bubble[device]),
            str(timeline.peak_activations[device]),
        ]
        for device in range(timeline.schedule.num_devices)
    ]
    return table(["device", "busy", "bubble", "own-span bubble", "peak activations"], rows)
