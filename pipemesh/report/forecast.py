"""What a page says of the forecast of a step: predicted beside measured, and what would help."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.partition.text import bytes_text
from pipemesh.plan import predict
from pipemesh.report.change import Basis, Change, basis_of
from pipemesh.report.change.changes import LEAST, best, best_of_each, least
from pipemesh.report.difference import parts_of
from pipemesh.report.markup import note, table
from pipemesh.report.run import MEMORY, Run
from pipemesh.schedule import Timeline
from pipemesh.schedule.render.svg import escape

# What a device has only since its first step.
_OF_STEPS = ("gradients", "activations")
# Of a kind of change, and of those that are not the best of their kind.
_MORE = 2
_KINDS = {
    "microbatches": "number of microbatches",
    "schedule": "schedule",
    "cuts": "where layers are cut",
    "remat": "less computed again",
    "mesh": "fewer stages, more replicas",
}


@dataclasses.dataclass(frozen=True)
class Compared:
    """A part of a step as it was predicted and as it was measured.

    Attributes:
        name: of the part.
        predicted: in seconds, or a share; None if nothing was.
        measured: the same; None if it is not known.
        about: what is to be known of it.
    """

    name: str
    predicted: float | None
    measured: float | None
    about: str = ""


def forecast(run: Run) -> Iterator[str]:
    """A step as predicted and as measured, part by part, and its memory.

    Args:
        run: what was recorded.
    """
    if "forecast" not in run.last and run.measured() is None:
        return
    predicted = run.fact("forecast", "predicted")
    if predicted is not None:
        rows = _in_seconds(run, predicted)
        yield _table(rows, "milliseconds", lambda value: f"{1e3 * value:.4g}")
        yield note(
            f"Predicted from what was measured of the layers before ({predicted['about']})."
            if predicted.get("about")
            else "Predicted from what was measured of the layers before."
        )
    else:
        why = run.fact("forecast", "unpredicted", "what layers take was not measured")
        yield note(f"Seconds were not predicted: {why}.")
        if (usual := _usual(run)) is not None:
            timed = run.fact("schedule", "seconds")
            beside = f", the one that was timed {1e3 * timed:.4g} ms" if timed else ""
            yield note(f"A step took {1e3 * usual:.4g} ms, the median of training{beside}.")
        rows = _in_shares(run)
        if rows:
            yield _table(rows, "share of the pipeline's time", lambda value: f"{value:.1%}")
            yield note(
                "Shares are compared here and not seconds, since what is predicted follows from "
                "the flops of layers alone."
            )
    yield from _memory(run, predicted)


def _in_seconds(run: Run, predicted: Mapping[str, Any]) -> list[Compared]:
    parts: Mapping[str, float] = predicted["parts"]
    timed = run.measured()
    seconds = run.fact("schedule", "seconds")
    found = {part.name: 1e-3 * part.time for part in parts_of(timed)} if timed else {}
    rest = None
    if timed and seconds is not None:
        rest = seconds - 1e-3 * timed.makespan
    behind = sum(parts[name] for name in ("gradients", "optimizer", "fixed"))
    rows = [
        Compared("work", parts["compute"], found.get("work"), "spread evenly over all devices"),
        Compared(
            "filling and draining",
            parts["bubble"],
            found.get("filling and draining"),
            "waiting that the order of actions has",
        ),
        Compared(
            "imbalance",
            parts["imbalance"],
            found.get("imbalance"),
            "waiting because stages do not take equally long",
        ),
        Compared(
            "overhead of operations",
            parts["actions"],
            found.get("overhead"),
            "measured between two actions; what is within them is in the measured work",
        ),
        Compared("transfers", parts["transfers"], found.get("transfers"), "between stages"),
        Compared(
            "collectives",
            parts["sums"],
            None,
            "sums of devices that share layers; in the measured work",
        ),
        Compared("overlap", None, found.get("overlap"), "actions that began with first results"),
        Compared("variation", None, found.get("variation"), "actions that are not as usual"),
        Compared(
            "optimizer and the rest",
            behind,
            rest,
            f"predicted: gradients of replicas {1e3 * parts['gradients']:.4g}, optimizer "
            f"{1e3 * parts['optimizer']:.4g}, fixed {1e3 * parts['fixed']:.4g}",
        ),
    ]
    absent = {"overlap"} - found.keys() | (set[str]() if parts["sums"] else {"collectives"})
    rows = [row for row in rows if row.name not in absent]
    rows.append(Compared("in all, the step that was timed", predicted["seconds"], seconds))
    usual = _usual(run)
    about = "those of training, which no clock slows down"
    return [*rows, Compared("a step, median", predicted["seconds"], usual, about)]


def _in_shares(run: Run) -> list[Compared]:
    ahead, timed = run.predicted(), run.measured()
    if ahead is None or timed is None:
        return []
    before, now = _shares(ahead), _shares(timed)
    of_flops = ("work", "filling and draining", "imbalance")
    return [Compared(n, before[n] if n in of_flops else None, share) for n, share in now.items()]


def _shares(timeline: Timeline) -> dict[str, float]:
    whole = timeline.makespan or 1.0
    return {part.name: part.time / whole for part in parts_of(timeline)}


def _usual(run: Run) -> float | None:
    """Seconds of a step of training."""
    values = [value for _, value in run.train.get("seconds", []) if value is not None]
    return statistics.median(values) if values else None


def _table(rows: list[Compared], unit: str, text: Callable[[float], str]) -> str:
    def told(value: float | None) -> str:
        return "not known" if value is None else text(value)

    lines: list[list[str]] = []
    for row in rows:
        off = ""
        if row.predicted is not None and row.measured is not None:
            difference = row.measured - row.predicted
            off = ("+" if difference >= 0 else "") + text(difference)
        lines.append([row.name, told(row.predicted), told(row.measured), off, row.about])
    width = 5 if any(row.about for row in rows) else 4
    head = [unit, "predicted", "measured", "difference", ""]
    return table(head[:width], [line[:width] for line in lines], left=(0, 4))


def _memory(run: Run, predicted: Mapping[str, Any] | None) -> Iterator[str]:
    """Bytes by the figures of layers, as counted in the graph, and in use."""
    devices: list[Any] = run.table("forecast", "devices")
    held = [sum(float(each[part]) for part in MEMORY) for each in devices]
    peak = run.fact("measured", "peak_memory")
    places: list[float] = list(predicted["memory"]) if predicted else []
    if not (held or places):
        return
    is_cpu = not devices or "CPU" in str(devices[0]["device"])

    def told(value: float | None) -> str:
        return "not known" if value is None else bytes_text(value)

    rows = [
        [
            "the fullest device",
            told(max(places) if places else None),
            told(max(held) if held else None),
            "not known",
        ],
        [
            "all devices",
            told(_of_all(run, places)),
            told(sum(held) if held else None),
            "not known" if is_cpu else told(peak),
        ],
    ]
    if is_cpu:
        before = run.fact("begin", "peak_memory")
        more = sum(float(each[part]) for each in devices for part in _OF_STEPS)
        counted = float(before) + more if before and devices else None
        rows.append(["the process", "not known", told(counted), told(peak)])
    yield "<h3>Memory</h3>"
    yield table(
        ["", "predicted from figures of layers", "counted in the step's graph", "measured"], rows
    )
    if is_cpu:
        yield note(
            "Devices of a CPU share the memory of their process, so what one of them has in use is "
            "not known; the process has Python, TensorFlow and the data besides. Counted of it is "
            "what it had before its first step, with the weights, and what a step keeps; what "
            "building the graph takes, and operations while they run, is not."
        )


def _of_all(run: Run, places: list[float]) -> float | None:
    """Of each place along `layers` all devices hold as much."""
    devices: list[Any] = run.table("forecast", "devices")
    if not places:
        return None
    return sum(places) * max(1, len(devices) // len(places))


def advice(run: Run) -> Iterator[str]:
    """The one change of the plan that would help most, and those that come next.

    Args:
        run: what was recorded.
    """
    if run.measured() is None:
        return
    basis = basis_of(run)
    try:
        if isinstance(basis, Basis):
            yield from _advice(basis)
            return
        why = basis
    except PipemeshError as error:
        why = str(error)
    yield note(f"Which change of the plan would help is not known: {why}.")


def _advice(basis: Basis) -> Iterator[str]:
    found = basis.changes()
    now = predict(basis.plan, basis.figures, basis.batch).seconds
    yield f"<p>{sentence(found, now)}</p>"
    if found:
        shown = _shown(found, now)
        rows = [_row(each, now, basis) for each in shown]
        head = ["change", "flags", "ms a step", "shorter by", "fullest device", "if"]
        # Where nothing is supposed there is nothing to say of it.
        width = 6 if any(each.supposed for each in shown) else 5
        yield table(head[:width], [row[:width] for row in rows], left=(0, 1, 5))
    yield note(
        f"{len(found)} changes were simulated with what actions took in the step that was timed "
        f"({1e3 * now:.4g} ms); none was run. {_limits(basis)}"
    )


def sentence(found: list[Change], now: float) -> str:
    """The one change that would help most, as HTML.

    Args:
        found: changes, shortest step first.
        now: seconds of a step as it is.
    """
    if not found:
        return "There is nothing to change: no other plan of these devices is known."
    named = best(found, now)
    gain = 1 - named.prediction.seconds / now
    if gain <= least(named):
        beside = f", if {escape(named.supposed)}" if named.supposed else ""
        return (
            "No change that was tried is known to make a step shorter by more than "
            f"{least(named):.0%}; {_flags(named)} comes to {gain:+.1%}{beside}."
        )
    return (
        f"The one change that would help most: <b>{_flags(named)}</b>, a step "
        f"shorter by {gain:.1%} ({1e3 * named.prediction.seconds:.4g} ms instead of "
        f"{1e3 * now:.4g} ms)" + (f", if {escape(named.supposed)}." if named.supposed else ".")
    )


def _flags(each: Change) -> str:
    """Flags as code, of which a line ends with a whole one."""
    return " ".join(f"<code class=flag>{escape(flag)}</code>" for flag in each.words)


def _shown(found: list[Change], now: float) -> list[Change]:
    """The one that is named, the best of each kind, and some more that help."""
    named = best(found, now)
    first = [named, *(each for each in best_of_each(found) if each.kind != named.kind)]
    chosen = list(first)
    for each in found:
        seconds = each.prediction.seconds
        is_new = all(abs(seconds - e.prediction.seconds) > 1e-3 * now for e in chosen)
        if is_new and seconds < (1 - LEAST) * now and len(chosen) < len(first) + _MORE:
            chosen.append(each)
    return [each for each in found if each in chosen]


def _row(each: Change, now: float, basis: Basis) -> list[str]:
    memory = max(each.prediction.memory)
    return [
        _KINDS[each.kind],
        each.flags,
        f"{1e3 * each.prediction.seconds:.4g}",
        f"{1 - each.prediction.seconds / now:+.1%}",
        bytes_text(memory) if basis.knows_memory else "not known",
        each.supposed,
    ]


def _limits(basis: Basis) -> str:
    """What changes were held to."""
    told: list[str] = []
    if basis.memory is None:
        told.append(
            "What a device has of memory is not known (--device_memory), so none was left out."
        )
    elif not basis.knows_memory:
        told.append("What layers hold is not known, so none was left out for its memory.")
    else:
        told.append(f"Those that need more than {bytes_text(basis.memory)} a device are left out.")
    if not basis.knows_rows:
        told.append(
            "What smaller microbatches take was not measured, so at most four times as many were "
            "tried; with figures of `pipemesh plan --save` all are."
        )
    if basis.knows_layers and not basis.knows_rows:
        told.append("A layer's share of its stage's time is that of its flops.")
    busy = max(basis.figures.loads.values(), default=1.0)
    if basis.figures.cores is not None and busy > 1:
        told.append(
            f"Devices share {basis.figures.cores:.4g} cores, of which an action alone kept "
            f"up to {busy:.1f} busy, so what runs at the same time gains less."
        )
    if not basis.knows_layers:
        told.append("Nothing is known of single layers, so no stage was cut anew.")
    return " ".join(told)
