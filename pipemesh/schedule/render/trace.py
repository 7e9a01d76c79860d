"""A schedule as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from typing import Any

from pipemesh.schedule.render.palette import NAMES
from pipemesh.schedule.timeline import Timeline

# Names of colours that the trace viewer knows; Perfetto picks its own by the name of the slice.
_COLOURS = {"F": "thread_state_running", "B": "bad", "I": "terrible", "W": "good", "R": "rail_load"}


def to_trace(
    timeline: Timeline, *, microseconds: float = 1000.0, measured: Timeline | None = None
) -> str:
    """Writes one thread a device, one slice an action, and a counter of what each device holds.

    Args:
        timeline: what to write.
        microseconds: how long one unit of the costs lasts in the trace.
        measured: what a real step took, in the same unit; written below as a process of its own.

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
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": title}}
    ]
    for device in range(timeline.schedule.num_devices):
        name = {"name": f"device {device}"}
        events += [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": device, "args": name},
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": process,
                "tid": device,
                "args": {"sort_index": device},
            },
        ]
    for span in timeline.spans():
        action = span.action
        events.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": NAMES[action.kind],
                "cname": _COLOURS[action.kind],
                "pid": process,
                "tid": span.device,
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "args": {
                    "stage": action.stage,
                    "microbatch": action.microbatch,
                    **({} if action.slice is None else {"slice": action.slice}),
                },
            }
        )
    for device in range(timeline.schedule.num_devices):
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
