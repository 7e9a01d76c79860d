"""Sections of a run's page on its forecast: predicted beside measured, and the best change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.plan import predict
from pipemesh.report.html_page import note, table
from pipemesh.report.measured_step import parts_of
from pipemesh.report.plan_changes import LEAST, Basis, Change, basis_of, best, least
from pipemesh.report.record import MEMORY, Run
from pipemesh.schedule import Timeline
from pipemesh.text import bytes_text

# Memory that exists only from the first step on.
_OF_STEPS = ("gradients", "activations")
# Changes shown besides the best of each kind.
_MORE = 2
_KINDS = {
    "microbatches": "number of microbatches",
    "schedule": "schedule",
    "cuts": "where layers are cut",
    "remat": "less computed again",
    "mesh": "fewer stages, more replicas",
}
# The parts of a step: the name, those in a prediction and in a measured step, and the meaning.
_PARTS = (
    ("work", "compute", "work", "spread evenly over all devices"),
    ("filling and draining", "bubble", "filling and draining", "waiting in this order of actions"),
    ("imbalance", "imbalance", "imbalance", "waiting because stages take different times"),
    (
        "overhead of operations",
        "actions",
        "overhead",
        "measured between two actions; overhead within them counts as measured work",
    ),
    ("transfers", "transfers", "transfers", "between stages"),
    ("collectives", "sums", "", "sums over devices that share layers; part of the measured work"),
    ("overlap", "", "overlap", "actions that started with first results"),
    ("variation", "", "variation", "actions unlike the median of their stage"),
)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A part of a step in seconds, or a share: predicted and measured."""

    name: str
    predicted: float | None
    measured: float | None
    about: str = ""


def forecast(run: Run) -> Iterator[str]:
    """Compares the predicted with the measured step, part by part, and its memory."""
    if "forecast" not in run.last and run.measured() is None:
        return
    predicted = run.fact("forecast", "predicted")
    if predicted is not None:
        rows = _in_seconds(run, predicted)
        yield _table(rows, "milliseconds", lambda value: f"{1e3 * value:.4g}")
        yield note(
            f"Predicted from measurements of the layers ({predicted['about']})."
            if predicted.get("about")
            else "Predicted from measurements of the layers."
        )
    else:
        why = run.fact("forecast", "unpredicted", "the layers were not measured")
        yield note(f"Seconds were not predicted: {why}.")
        if (usual := run.median("seconds")) is not None:
            timed = run.fact("schedule", "seconds")
            beside = f"; the timed step took {1e3 * timed:.4g} ms" if timed else ""
            yield note(f"The median training step took {1e3 * usual:.4g} ms{beside}.")
        rows = _in_shares(run)
        if rows:
            yield _table(rows, "share of the pipeline's time", lambda value: f"{value:.1%}")
            yield note(
                "Shares are compared here and not seconds, since the prediction uses only the "
                "flops of layers."
            )
    yield from _memory(run, predicted)


def _in_seconds(run: Run, predicted: Mapping[str, Any]) -> list[Compared]:
    """Returns the parts of the predicted and of the timed step in seconds."""
    parts: Mapping[str, float] = predicted["parts"]
    timed = run.measured()
    seconds = run.fact("schedule", "seconds")
    measured = {part.name: 1e-3 * part.time for part in parts_of(timed)} if timed else {}
    behind = sum(parts[name] for name in ("gradients", "optimizer", "fixed"))
    rest = seconds - 1e-3 * timed.makespan if timed and seconds is not None else None
    about = (
        f"predicted: gradients of replicas {1e3 * parts['gradients']:.4g}, optimizer "
        f"{1e3 * parts['optimizer']:.4g}, fixed {1e3 * parts['fixed']:.4g}"
    )
    rows = [
        Compared(name, parts.get(predicted_name), measured.get(measured_name), about_part)
        for name, predicted_name, measured_name, about_part in _PARTS
    ]
    rows.append(Compared("optimizer and the rest", behind, rest, about))
    absent = {"overlap"} - measured.keys() | (set[str]() if parts["sums"] else {"collectives"})
    rows = [row for row in rows if row.name not in absent]
    rows.append(Compared("total, the timed step", predicted["seconds"], seconds))
    usual = run.median("seconds")
    about = "training steps, which are not slowed down by timing"
    return [*rows, Compared("median step", predicted["seconds"], usual, about)]


def _in_shares(run: Run) -> list[Compared]:
    """Returns the parts of the step by flops and of the timed step, as shares of the makespan."""
    ahead, timed = run.predicted(), run.measured()
    if ahead is None or timed is None:
        return []
    before, now = _shares(ahead), _shares(timed)
    of_flops = ("work", "filling and draining", "imbalance")
    return [Compared(n, before[n] if n in of_flops else None, share) for n, share in now.items()]


def _shares(timeline: Timeline) -> dict[str, float]:
    whole = timeline.makespan or 1.0
    return {part.name: part.time / whole for part in parts_of(timeline)}


def _told(value: float | None, text: Callable[[float], str] = bytes_text) -> str:
    return "not known" if value is None else text(value)


def _table(rows: list[Compared], unit: str, text: Callable[[float], str]) -> str:
    """Returns a table of parts, each with the difference."""
    lines: list[list[str]] = []
    for row in rows:
        off = ""
        if row.predicted is not None and row.measured is not None:
            difference = row.measured - row.predicted
            off = ("+" if difference >= 0 else "") + text(difference)
        texts = [_told(value, text) for value in (row.predicted, row.measured)]
        lines.append([row.name, *texts, off, row.about])
    width = 5 if any(row.about for row in rows) else 4
    head = [unit, "predicted", "measured", "difference", ""]
    return table(head[:width], [line[:width] for line in lines], left=(0, 4))


def _memory(run: Run, predicted: Mapping[str, Any] | None) -> Iterator[str]:
    """Compares bytes by the figures of layers, counted in the graph, and in use."""
    devices: list[Any] = run.table("forecast", "devices")
    held = [sum(float(device[part]) for part in MEMORY) for device in devices]
    # 0 if it is not known.
    peak = run.fact("measured", "peak_memory") or None
    places: list[float] = list(predicted["memory"]) if predicted else []
    if not (held or places):
        return
    is_cpu = not devices or "CPU" in str(devices[0]["device"])
    # Devices of one home hold equally much.
    of_all = sum(places) * max(1, len(devices) // len(places)) if places else None
    rows = [
        [
            "the fullest device",
            _told(max(places, default=None)),
            _told(max(held, default=None)),
            "not known",
        ],
        [
            "all devices",
            _told(of_all),
            _told(sum(held) if held else None),
            _told(None if is_cpu else peak),
        ],
    ]
    if is_cpu:
        before = run.fact("begin", "peak_memory")
        more = sum(float(device[part]) for device in devices for part in _OF_STEPS)
        counted = float(before) + more if before and devices else None
        rows.append(["the process", "not known", _told(counted), _told(peak)])
    yield "<h3>Memory</h3>"
    yield table(
        ["", "predicted from figures of layers", "counted in the step's graph", "measured"], rows
    )
    if is_cpu:
        yield note(
            "Devices of a CPU share the memory of their process, so the memory of one device "
            "cannot be measured. The process also holds Python, TensorFlow and the data. Its "
            "counted number is its memory before the first step, with the weights, plus what a "
            "step keeps. Building the graph and temporary memory of operations are not counted."
        )


def advice(run: Run) -> Iterator[str]:
    """Names the change of the plan that would help most, with the next best ones."""
    if run.measured() is None:
        return
    basis = why = basis_of(run)
    if isinstance(basis, Basis):
        try:
            yield from _advice(basis)
            return
        except PipemeshError as error:
            why = error
    yield note(f"The best change of the plan is not known: {why}.")


def _advice(basis: Basis) -> Iterator[str]:
    """Returns the sentence about the best change, a table, and the limits of the search."""
    changes = basis.changes()
    now = predict(basis.plan, basis.figures, basis.batch).seconds
    yield f"<p>{sentence(changes, now)}</p>"
    if changes:
        shown = _shown(changes, now)
        rows = [_row(change, now, basis) for change in shown]
        head = ["change", "flags", "ms per step", "saves", "fullest device", "if"]
        # Without assumptions the last column is empty.
        width = 6 if any(change.supposed for change in shown) else 5
        yield table(head[:width], [row[:width] for row in rows], left=(0, 1, 5))
    yield note(
        f"{len(changes)} changes were simulated with the durations of the timed step "
        f"({1e3 * now:.4g} ms); none was run. {_limits(basis)}"
    )


def sentence(changes: list[Change], now: float) -> str:
    """Returns a sentence in HTML about the best change of a plan whose step takes `now` seconds."""
    if not changes:
        return "There is nothing to change: no other plan fits these devices."
    named = best(changes, now)
    gain = 1 - named.prediction.seconds / now
    if gain <= least(named):
        beside = f", if {escape(named.supposed)}" if named.supposed else ""
        return (
            f"No change that was tried saves more than {least(named):.0%} of a step; "
            f"{_flags(named)} saves {gain:.1%}{beside}."
        )
    return (
        f"The change that would help most: <b>{_flags(named)}</b>. It saves {gain:.1%} of a step "
        f"({1e3 * named.prediction.seconds:.4g} ms instead of "
        f"{1e3 * now:.4g} ms)" + (f", if {escape(named.supposed)}." if named.supposed else ".")
    )


def _flags(change: Change) -> str:
    """Returns flags as code; lines break only between flags."""
    return " ".join(f"<code class=flag>{escape(flag)}</code>" for flag in change.words)


def _shown(changes: list[Change], now: float) -> list[Change]:
    """Returns the named change, the best of each kind, and some more that help."""
    named = best(changes, now)
    first = {named.kind: named}
    for change in changes:
        first.setdefault(change.kind, change)
    chosen = list(first.values())
    for change in changes:
        seconds = change.prediction.seconds
        is_new = all(abs(seconds - e.prediction.seconds) > 1e-3 * now for e in chosen)
        if is_new and seconds < (1 - LEAST) * now and len(chosen) < len(first) + _MORE:
            chosen.append(change)
    return [change for change in changes if change in chosen]


def _row(change: Change, now: float, basis: Basis) -> list[str]:
    """Returns the row of a change."""
    memory = max(change.prediction.memory)
    return [
        _KINDS[change.kind],
        change.flags,
        f"{1e3 * change.prediction.seconds:.4g}",
        f"{1 - change.prediction.seconds / now:+.1%}",
        bytes_text(memory) if basis.knows_memory else "not known",
        change.supposed,
    ]


def _limits(basis: Basis) -> str:
    """Returns sentences on the limits and the assumptions of the search."""
    sentences: list[str] = []
    if basis.memory is None:
        sentences.append(
            "The memory of a device is not known (--device_memory), so none was left out."
        )
    elif not basis.knows_memory:
        sentences.append("The memory of layers is not known, so none was left out for its memory.")
    else:
        sentences.append(
            f"Changes that need more than {bytes_text(basis.memory)} per device are left out."
        )
    if not basis.knows_rows:
        sentences.append(
            "Smaller microbatches were not measured, so at most four times as many were tried; "
            "with figures of `pipemesh plan --save` all are."
        )
    if basis.knows_layers and not basis.knows_rows:
        sentences.append("A layer's share of its stage's time is that of its flops.")
    busy = max(basis.figures.loads.values(), default=1.0)
    if basis.figures.cores is not None and busy > 1:
        sentences.append(
            f"Devices share {basis.figures.cores:.4g} cores, and a single action kept up to "
            f"{busy:.1f} of them busy, so running more at the same time gains less."
        )
    if not basis.knows_layers:
        sentences.append("Single layers were not measured, so no stage was cut again.")
    return " ".join(sentences)
