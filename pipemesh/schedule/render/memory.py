"""How much a device holds over time, as a self-contained SVG picture."""

from __future__ import annotations

from pipemesh.schedule.render.palette import AXIS_LINE, EDGE, GRID, INK_TEXT
from pipemesh.schedule.render.svg import (
    LEFT,
    fitting_scale,
    header,
    names,
    time_axis,
)
from pipemesh.schedule.timeline import Timeline

_TOP = 50
_PANEL = 46
_GAP = 10
_BOTTOM = 44
_RIGHT = 90
_HOLDS = "#cc79a7"


def memory_to_svg(
    timeline: Timeline, *, title: str = "", scale: float | None = None, until: float | None = None
) -> str:
    """Draws one small step curve a device: the (stage, microbatch) pairs it holds.

    All panels share one vertical scale, so that devices can be compared.

    Args:
        timeline: what to draw.
        title: a heading.
        scale: pixels for each unit of time; by default as `to_svg` has it.
        until: where the time axis ends; by default at the makespan.

    Returns:
        An SVG document that refers to nothing outside itself.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> memory_to_svg(simulate(gpipe(2, 2))).count("<path")
        2
    """
    scale = fitting_scale([timeline]) if scale is None else scale
    end = timeline.makespan if until is None else until
    num_devices = timeline.schedule.num_devices
    plot = end * scale
    title = title or "Activations held, in (stage, microbatch) pairs"
    width = max(LEFT + plot + _RIGHT, 18 + 9.0 * len(title))
    height = _TOP + num_devices * (_PANEL + _GAP) + _BOTTOM
    top = max(timeline.peak_activations, default=0) or 1
    parts = header(width, height, title)
    for device in range(num_devices):
        floor = _TOP + device * (_PANEL + _GAP) + _PANEL
        peak = timeline.peak_activations[device]
        y_peak = floor - peak / top * _PANEL
        parts += [
            f"<line class='grid' x1='{LEFT}' y1='{floor}' x2='{LEFT + plot:.1f}' y2='{floor}' "
            f"stroke='{GRID}'/>",
            f"<path class='held' d='{_curve(timeline, device, scale, floor, _PANEL / top)}' "
            f"fill='{_HOLDS}' fill-opacity='0.35' stroke='{EDGE}' stroke-width='1.2'>"
            f"<title>device {device}: peak {peak}</title></path>",
            f"<line {AXIS_LINE} x1='{LEFT}' y1='{y_peak:.1f}' x2='{LEFT + plot:.1f}' "
            f"y2='{y_peak:.1f}' stroke-dasharray='3 3'/>",
            f"<text {INK_TEXT} x='{LEFT + plot + 8:.1f}' y='{y_peak:.1f}' "
            f"dominant-baseline='central'>peak {peak}</text>",
        ]
    middles = [_TOP + d * (_PANEL + _GAP) + _PANEL / 2 for d in range(num_devices)]
    parts += names(middles, _PANEL + _GAP)
    parts += time_axis(timeline, scale, _TOP + num_devices * (_PANEL + _GAP), end)
    return "\n".join([*parts, "</svg>\n"])


def _curve(timeline: Timeline, device: int, scale: float, floor: float, unit: float) -> str:
    steps = [f"M{LEFT} {floor}"]
    for time, held in timeline.activations(device):
        steps.append(f"H{LEFT + time * scale:.1f}V{floor - held * unit:.1f}")
    return "".join([*steps, f"H{LEFT + timeline.makespan * scale:.1f}V{floor}Z"])
