"""Sections of a run's page on its pipeline: schedule, memory, communication and workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipemesh.report.html_page import figure, note, table
from pipemesh.report.measured_step import parts_of
from pipemesh.report.record import MEMORY, Run
from pipemesh.report.schedule_drawing import LEFT, RIGHT, to_svg
from pipemesh.report.svg import Row, bar_chart
from pipemesh.schedule import Timeline, simulate
from pipemesh.text import bytes_text, short

# Pixels of a time axis, so that nothing scrolls at 1280 pixels.
_PLOT = 1200 - LEFT - RIGHT
# Measured memory is drawn beside the forecast up to this many times as much.
_MOST_BESIDE = 5
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def schedule(run: Run) -> Iterator[str]:
    """Draws the schedule as simulated and measured on one scale, and explains the difference."""
    measured = run.measured()
    if measured is None:
        predicted = run.predicted()
        if predicted is None:
            return
        yield _drawn({"predicted by flops": predicted}, "forward passes of a mean stage")
        yield note(
            "Predicted from the flops of layers. To measure a step, train with --trace_schedule."
        )
        return

    def bubble(timeline: Timeline) -> str:
        mean = timeline.total_bubble / timeline.schedule.num_devices
        return f"{short(mean)} ({timeline.bubble_ratio:.1%})"

    # Simulated with the measured durations, so this is not the forecast before the step.
    shown = {"simulated": simulate(measured.schedule, measured.costs), "measured": measured}
    yield _drawn(shown, "milliseconds")
    yield table(
        ["milliseconds", *shown],
        [
            ["makespan", *(short(timeline.makespan) for timeline in shown.values())],
            ["bubble, mean of devices", *map(bubble, shown.values())],
            ["largest own-span bubble", *(short(max(e.own_span_bubble)) for e in shown.values())],
            ["most activations held", *(str(max(e.peak_activations)) for e in shown.values())],
        ],
    )
    yield note(
        "Simulated: the schedule with the median duration of each stage's actions in the measured "
        "step. Activations are counted in pairs of a stage and a microbatch."
    )
    parts = parts_of(measured)
    rows: list[Row] = [
        (part.name, [(0 if n < 3 else 1, part.time)], f"{part.time:+.4g} ms")
        for n, part in enumerate(parts)
    ]
    total = f"{measured.makespan:.4g} ms"
    picture = bar_chart(
        "Where the time of a measured step went",
        rows,
        ["simulated", "on top of it"],
        write=lambda value: f"{value:.4g} ms",
        falling=True,
    )
    whole = measured.makespan or 1.0
    lines = [
        [part.name, f"{part.time:.4g}", f"{part.time / whole:.1%}", part.about] for part in parts
    ]
    yield "<h3>Where the difference came from</h3>"
    yield figure(picture)
    yield table(
        ["part", "milliseconds", "share", "meaning"],
        [*lines, ["total", total.removesuffix(" ms"), "100.0%", "the measured makespan"]],
        left=(0, 3),
    )


def _drawn(shown: Mapping[str, Timeline], unit: str) -> str:
    """Draws timelines below each other, on one scale."""
    until = max(timeline.end for timeline in shown.values())
    scale = _PLOT / until if until else 1.0
    return "\n".join(
        f"<figure role=img aria-label='{name}: makespan {short(timeline.makespan)} {unit}, bubble "
        f"{timeline.bubble_ratio:.1%}' class=scroll>"
        f"{to_svg(timeline, title=f'{name}, {unit}', scale=scale, until=until)}</figure>"
        for name, timeline in shown.items()
    )


def memory(run: Run) -> Iterator[str]:
    """Draws the predicted memory of each device, and tells how much was in use."""
    forecast: list[Any] = run.table("forecast", "devices")
    peak = run.fact("measured", "peak_memory")
    if not forecast:
        if peak:
            yield note(f"Peak: {bytes_text(float(peak))}; nothing was predicted.")
        return
    held: list[tuple[str, list[float]]] = [
        (str(device["device"]), [float(device[part]) for part in MEMORY]) for device in forecast
    ]
    if len(held) > 1:
        whole = [sum(parts[number] for _, parts in held) for number in range(len(MEMORY))]
        held.append(("all, predicted", whole))
    predicted = max(sum(parts) for _, parts in held)
    # Beside a process that uses far more, the forecast would be too small to see.
    is_drawn = peak and float(peak) <= _MOST_BESIDE * predicted
    largest = max(predicted, float(peak) if is_drawn else 0.0)
    unit, size = next((u for u in _UNITS if largest >= u[1]), _UNITS[-1])
    rows: list[Row] = [
        (name, [(n, part / size) for n, part in enumerate(parts)], bytes_text(sum(parts)))
        for name, parts in held
    ]
    if is_drawn:
        rows.append(("all, measured", [(4, float(peak) / size)], bytes_text(float(peak))))
    yield figure(
        bar_chart(
            "Memory by device",
            rows,
            [*MEMORY, "peak in use" if is_drawn else ""],
            write=lambda value: f"{value:.4g} {unit}",
        ),
        fold=table(
            ["device", *MEMORY, "total"],
            [[name, *map(bytes_text, parts), bytes_text(sum(parts))] for name, parts in held],
        ),
    )
    yield note(
        "Predicted: memory kept between actions. Temporary memory of a running action comes on top."
    )
    if peak and "CPU" in held[0][0]:
        yield note(
            f"Measured: the process used at most {bytes_text(float(peak))}, with Python, "
            "TensorFlow and the data. The devices of a CPU share it."
        )
    elif peak:
        yield note(f"Measured: all devices together used at most {bytes_text(float(peak))}.")


def communication(run: Run) -> str:
    """Returns a table of the bytes sent along each axis in a step; "" if nothing is known."""
    sent: list[Any] = run.table("forecast", "sent")
    rows = [
        [
            str(transfer["axes"]),
            str(transfer["what"]),
            f"{transfer['times']:,}",
            bytes_text(transfer["bytes"]),
        ]
        for transfer in sent
    ]
    head = ["axis", "data", "transfers per device", "bytes per step, all devices"]
    return table(head, rows, left=(0, 1)) if rows else ""


def workers(run: Run) -> Iterator[str]:
    """Tells how long each worker was busy in a step, and which workers are slow."""
    rows_of_workers: list[Any] = run.table("workers", "workers")
    if not rows_of_workers:
        return
    slow = [str(worker["worker"]) for worker in rows_of_workers if worker["is_slow"]]
    if slow:
        yield note(f"Slow: {', '.join(slow)}.")
    rows = [
        [
            str(worker["worker"]),
            f"{worker['seconds']:.4g}",
            "" if worker["times"] is None else f"{worker['times']:.2f}",
            "slow" if worker["is_slow"] else "",
        ]
        for worker in rows_of_workers
    ]
    yield table(["worker", "busy seconds per step", "relative to its flops", ""], rows, left=(0, 3))
    yield note(
        "A worker is busy from the arrival of an action's inputs until its results are ready. "
        "Relative to its flops: its seconds per flop divided by those of the other workers; from 2 "
        "on, a worker is slow."
    )
