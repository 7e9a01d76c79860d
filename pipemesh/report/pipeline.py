"""What a page says of a pipeline: its schedule, its memory, and what goes between devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipemesh.partition.text import bytes_text
from pipemesh.report.bars import Row, bars
from pipemesh.report.difference import parts_of
from pipemesh.report.markup import figure, note, table
from pipemesh.report.run import MEMORY, Run
from pipemesh.report.scale import short
from pipemesh.schedule import Timeline, simulate
from pipemesh.schedule.render import to_svg
from pipemesh.schedule.render.svg import LEFT, RIGHT

# Of a time axis, so that nothing scrolls at 1280 pixels.
_PLOT = 1200 - LEFT - RIGHT
_MOST_BESIDE = 5
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def schedule(run: Run) -> Iterator[str]:
    """The schedule as simulated and measured, on one scale, and where the difference came from.

    Args:
        run: what was recorded.
    """
    measured = run.measured()
    if measured is None:
        predicted = run.predicted()
        if predicted is None:
            return
        yield _drawn({"predicted by flops": predicted}, "forward passes of a mean stage")
        yield note(
            "Predicted from the flops of layers. To see what a step really takes, train with "
            "--trace_schedule."
        )
        return
    # What was predicted before the step is another thing.
    shown = {"simulated": simulate(measured.schedule, measured.costs), "measured": measured}
    yield _drawn(shown, "milliseconds")
    yield table(
        ["milliseconds", *shown],
        [
            ["makespan", *(short(each.makespan) for each in shown.values())],
            ["bubble, mean of devices", *(_bubble(each) for each in shown.values())],
            ["largest own-span bubble", *(short(max(e.own_span_bubble)) for e in shown.values())],
            ["most activations held", *(str(max(e.peak_activations)) for e in shown.values())],
        ],
    )
    yield note(
        "Simulated with what actions of each stage usually took in the measured step, which timed "
        "each of them. Activations are counted in pairs of a stage and a microbatch."
    )
    parts = parts_of(measured)
    rows: list[Row] = [
        (part.name, [(0 if n < 3 else 1, part.time)], f"{part.time:+.4g} ms")
        for n, part in enumerate(parts)
    ]
    total = f"{measured.makespan:.4g} ms"
    picture = bars(
        "Where the time of a measured step went",
        rows,
        ["simulated", "on top of it"],
        text=lambda value: f"{value:.4g} ms",
        falling=True,
    )
    lines = [
        [part.name, f"{part.time:.4g}", _share(part.time, measured.makespan), part.about]
        for part in parts
    ]
    yield "<h3>Where the difference came from</h3>"
    yield figure(picture)
    yield table(
        ["part", "milliseconds", "share", "what it is"],
        [*lines, ["in all", total.removesuffix(" ms"), "100.0%", "the measured makespan"]],
        left=(0, 3),
    )


def _drawn(shown: Mapping[str, Timeline], unit: str) -> str:
    """Timelines below each other, on one scale."""
    until = max(each.makespan for each in shown.values())
    scale = _PLOT / until if until else 1.0
    return "\n".join(
        f"<figure role=img aria-label='{name}: makespan {short(each.makespan)} {unit}, bubble "
        f"{each.bubble_ratio:.1%}' class=scroll>"
        f"{to_svg(each, title=f'{name}, {unit}', scale=scale, until=until)}</figure>"
        for name, each in shown.items()
    )


def _bubble(timeline: Timeline) -> str:
    devices = timeline.schedule.num_devices
    return f"{short(timeline.total_bubble / devices)} ({timeline.bubble_ratio:.1%})"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def memory(run: Run) -> Iterator[str]:
    """What each device was to hold, and what was in use.

    Args:
        run: what was recorded.
    """
    forecast: list[Any] = run.table("forecast", "devices")
    peak = run.fact("measured", "peak_memory")
    if not forecast:
        if peak:
            yield note(f"At most {bytes_text(float(peak))} were in use; nothing was predicted.")
        return
    held: list[tuple[str, list[float]]] = [
        (str(each["device"]), [float(each[part]) for part in MEMORY]) for each in forecast
    ]
    if len(held) > 1:
        whole = [sum(parts[number] for _, parts in held) for number in range(len(MEMORY))]
        held.append(("all, predicted", whole))
    predicted = max(sum(parts) for _, parts in held)
    # Beside a process that has far more, what was predicted could not be seen.
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
        bars(
            "Memory by device",
            rows,
            [*MEMORY, "in use at most" if is_drawn else ""],
            text=lambda value: f"{value:.4g} {unit}",
        ),
        fold=_memory_table(held),
    )
    yield note("Predicted is what stays; what an action needs while it runs comes on top.")
    if peak and "CPU" in held[0][0]:
        yield note(
            f"Measured: {bytes_text(float(peak))} at most, of the process with Python, TensorFlow "
            "and the data; devices of a CPU share it."
        )
    elif peak:
        yield note(f"Measured: {bytes_text(float(peak))} at most, of all devices.")


def _memory_table(held: Sequence[tuple[str, Sequence[float]]]) -> str:
    return table(
        ["device", *MEMORY, "in all"],
        [[name, *map(bytes_text, parts), bytes_text(sum(parts))] for name, parts in held],
    )


def communication(run: Run) -> str:
    """What goes along each axis in a step; "" if nothing is known.

    Args:
        run: what was recorded.
    """
    sent: list[Any] = run.table("forecast", "sent")
    rows = [
        [str(each["axes"]), str(each["what"]), f"{each['times']:,}", bytes_text(each["bytes"])]
        for each in sent
    ]
    head = ["axis", "what", "times a device", "bytes a step, all devices"]
    return table(head, rows, left=(0, 1)) if rows else ""


def workers(run: Run) -> Iterator[str]:
    """How long each worker was at work in a step, and who is slow.

    Args:
        run: what was recorded.
    """
    found: list[Any] = run.table("workers", "workers")
    if not found:
        return
    slow = [str(each["worker"]) for each in found if each["is_slow"]]
    if slow:
        yield note(f"Slow: {', '.join(slow)}.")
    rows = [
        [
            str(each["worker"]),
            f"{each['seconds']:.4g}",
            "" if each["times"] is None else f"{each['times']:.2f}",
            "slow" if each["is_slow"] else "",
        ]
        for each in found
    ]
    yield table(["worker", "seconds at work a step", "for its flops", ""], rows, left=(0, 3))
    yield note(
        "At work is between what an action needs and its results. For its flops: so many times the "
        "seconds of the other workers; from 2 on, a worker is slow."
    )
