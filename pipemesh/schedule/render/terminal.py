"""A schedule as a table for the terminal, true to scale in time."""

from __future__ import annotations

from pipemesh.errors import ScheduleError
from pipemesh.schedule.render.axis import scale_for
from pipemesh.schedule.render.palette import fill, ink, levels
from pipemesh.schedule.timeline import Timeline

_RESET = "\x1b[0m"
_NARROWEST = 20
_WIDEST = 10_000


def to_terminal(timeline: Timeline, *, color: bool = False, width: int | None = None) -> str:
    """Draws one line a device; the horizontal axis is time.

    A cell shows its action and is as wide as the action is long; without colours the rest of the
    cell is dashes. Blank is idle. Cells that are too narrow for their text show only what fits.

    Args:
        timeline: what to draw.
        color: whether to colour the cells with ANSI codes (24-bit).
        width: how many columns there are; by default as many as it takes to show the text of all
            actions but brief ones, and at most 10,000.

    Returns:
        The lines, without a newline at the end.

    Raises:
        ScheduleError: `width` leaves no room for anything.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> print(to_terminal(simulate(gpipe(1, 2))))
        device 0 |0F0 0F1 0B1---- 0B0----
    """
    labels = [f"device {device} |" for device in range(timeline.schedule.num_devices)]
    margin = max(map(len, labels))
    scale = _characters_per_time(timeline)
    if width is None:
        width = _WIDEST
    if width < margin + _NARROWEST:
        raise ScheduleError(
            f"width is {width}; a table needs at least {margin + _NARROWEST} columns"
        )
    if timeline.makespan:
        scale = min(scale, (width - margin) / timeline.makespan)
    pale = levels(timeline.schedule.stage_devices)
    lines = [[label.rjust(margin)] for label in labels]
    column = [0] * len(lines)
    for span in timeline.spans():
        start, end = round(span.start * scale), round(span.end * scale)
        # Round-off must not make a cell begin before its neighbour has ended.
        start = max(start, column[span.device])
        if end <= start:
            continue
        text = _cell(str(span.action), end - start)
        if color:
            background = fill(span.action.kind, pale[span.action.stage])
            front = "30" if ink(background) == "#000000" else "97"
            # A blank between cells belongs to neither colour.
            text = "\x1b[48;2;{};{};{};{}m{}{}{}".format(
                *background, front, text[:-1].replace("-", " "), _RESET, " " if text else ""
            )
        lines[span.device] += [" " * (start - column[span.device]), text]
        column[span.device] = end
    return "\n".join("".join(line).rstrip(" ") for line in lines)


def _cell(label: str, width: int) -> str:
    """A label in `width` columns, the last of which is blank if there is another."""
    room = max(1, width - 1)
    if len(label) > room:
        kind = next(i for i, c in enumerate(label) if c.isalpha())
        label = label[kind : kind + room]
    return label.ljust(room, "-") + " " * (width - room)


def _characters_per_time(timeline: Timeline) -> float:
    """The scale at which actions still show their text, but for the briefest."""
    return scale_for((len(str(s.action)) + 1, s.end - s.start) for s in timeline.spans())
