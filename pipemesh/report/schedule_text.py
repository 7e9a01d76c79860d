"""A timeline as text: a table for the terminal, and a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from pipemesh.errors import ScheduleError
from pipemesh.report.schedule_drawing import NAMES, ON_LINKS, fill, ink, levels
from pipemesh.report.svg import scale_for
from pipemesh.schedule import Timeline

_RESET = "\x1b[0m"
_NARROWEST = 20
_WIDEST = 10_000
# Names of colours that the trace viewer knows; Perfetto picks its own by the name of the slice.
_COLOURS = {
    "F": "thread_state_running",
    "B": "bad",
    "I": "terrible",
    "W": "good",
    "R": "rail_load",
    "G": "thread_state_iowait",
    "S": "yellow",
}


def to_terminal(timeline: Timeline, *, color: bool = False, width: int | None = None) -> str:
    """Draws one line for each device and link; the horizontal axis is time.

    A cell shows its action and is as wide as the action is long; without colours, dashes fill the
    rest of the cell. On links, `1G` fetches (gathers) the weights of stage 1, and `1S` sums its
    gradients. Blank is idle. Cells that are too narrow for their text show a part of it.

    Args:
        timeline: the timeline to draw.
        color: whether to colour the cells with ANSI codes (24-bit).
        width: how many columns there are; by default as many as the text of all but brief actions
            needs, and at most 10,000.

    Returns:
        The lines, without a newline at the end.

    Raises:
        ScheduleError: `width` is too small for any cell.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> print(to_terminal(simulate(gpipe(1, 2))))
        device 0 |0F0 0F1 0B1---- 0B0----
    """
    num_devices = timeline.schedule.num_devices
    links = timeline.links
    labels = [f"device {device} |" for device in range(num_devices)]
    labels += [f"link {device} |" for device in links]
    margin = max(map(len, labels))
    # Actions still show their text, but for the briefest.
    scale = scale_for((len(str(s.action)) + 1, s.end - s.start) for s in timeline.spans())
    if width is None:
        width = _WIDEST
    if width < margin + _NARROWEST:
        raise ScheduleError(
            f"width is {width}; a table needs at least {margin + _NARROWEST} columns"
        )
    if timeline.end:
        scale = min(scale, (width - margin) / timeline.end)
    pale = levels(timeline.schedule.stage_devices)
    lines = [[label.rjust(margin)] for label in labels]
    column = [0] * len(lines)
    cells = [
        (s.device, s.start, s.end, str(s.action), fill(s.action.kind, pale[s.action.stage]))
        for s in timeline.spans()
    ]
    cells += [
        (num_devices + links.index(s.device), s.start, s.end, f"{s.stage}{s.kind}", fill(s.kind))
        for s in timeline.link_spans
    ]
    for row, begin, until, label, background in cells:
        start, end = round(begin * scale), round(until * scale)
        if row >= num_devices:
            # A link has few cells, so brief ones are shown, too.
            end = max(end, start + 1)
        # Round-off must not make a cell begin before its neighbour has ended.
        start = max(start, column[row])
        if end <= start:
            continue
        text = _cell(label, end - start)
        if color:
            front = "30" if ink(background) == "#000000" else "97"
            # A blank between cells belongs to neither colour.
            text = "\x1b[48;2;{};{};{};{}m{}{}{}".format(
                *background, front, text[:-1].replace("-", " "), _RESET, " " if text else ""
            )
        lines[row] += [" " * (start - column[row]), text]
        column[row] = end
    return "\n".join("".join(line).rstrip(" ") for line in lines)


def _cell(label: str, width: int) -> str:
    """Writes a label in `width` columns, the last of which is blank if there is another."""
    room = max(1, width - 1)
    if len(label) > room:
        kind = next(i for i, c in enumerate(label) if c.isalpha())
        label = label[kind : kind + room]
    return label.ljust(room, "-") + " " * (width - room)


def to_trace(
    timeline: Timeline, *, microseconds: float = 1000.0, measured: Timeline | None = None
) -> str:
    """Writes a thread for each device and link, a slice for each of their cells, and counters.

    Args:
        timeline: the timeline to write.
        microseconds: how long one unit of the costs lasts in the trace.
        measured: a real step in the same unit; it becomes a process of its own, below the other.

    Returns:
        JSON in the Trace Event Format.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> events = json.loads(to_trace(simulate(gpipe(1, 1))))["traceEvents"]
        >>> [event["name"] for event in events if event["ph"] == "X"]
        ['0F0', '0B0']
    """
    if measured is None:
        events = _events(timeline, 0, "pipeline", microseconds)
    else:
        events = _events(timeline, 0, "predicted", microseconds)
        events += _events(measured, 1, "measured", microseconds)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None) + "\n"


def _events(
    timeline: Timeline, process: int, title: str, microseconds: float
) -> list[dict[str, Any]]:
    """Returns the events of one process of a trace."""

    def about(kind: str, device: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process, "tid": device, "args": arguments}

    def lasts(
        thread: int, start: float, end: float, name: str, kind: str, colour: str, **numbers: Any
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": name,
            "cat": kind,
            "cname": colour,
            "pid": process,
            "tid": thread,
            "ts": start * microseconds,
            "dur": (end - start) * microseconds,
            "args": {name: value for name, value in numbers.items() if value is not None},
        }

    num_devices = timeline.schedule.num_devices
    threads = {device: f"device {device}" for device in range(num_devices)}
    threads |= {num_devices + device: f"link of device {device}" for device in timeline.links}
    events = [about("process_name", 0, name=title)]
    for thread, name in threads.items():
        events += [
            about("thread_name", thread, name=name),
            about("thread_sort_index", thread, sort_index=thread),
        ]
    for span in timeline.spans():
        action = span.action
        numbers = {"stage": action.stage, "microbatch": action.microbatch, "slice": action.slice}
        looks = str(action), NAMES[action.kind], _COLOURS[action.kind]
        events.append(lasts(span.device, span.start, span.end, *looks, **numbers))
    for each in timeline.link_spans:
        looks = f"{each.stage}{each.kind}", ON_LINKS[each.kind], _COLOURS[each.kind]
        thread = num_devices + each.device
        events.append(lasts(thread, each.start, each.end, *looks, stage=each.stage))
    for device in range(num_devices):
        for time, held in timeline.activations(device):
            events.append(
                {
                    "ph": "C",
                    "name": f"activations of device {device}",
                    "pid": process,
                    "ts": time * microseconds,
                    "args": {"held": held},
                }
            )
    return events
