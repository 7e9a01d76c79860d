"""The page of one run."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from pipemesh.partition.text import bytes_text, count_text
from pipemesh.report.curves import curves
from pipemesh.report.forecast import advice, forecast
from pipemesh.report.markup import document, note, section, side_by_side, table
from pipemesh.report.pipeline import communication, memory, schedule, workers
from pipemesh.report.run import SAMPLES, Run
from pipemesh.report.scale import called, short
from pipemesh.schedule.render.svg import escape

# Lines of a kind, and samples, that are shown.
_MOST = 20


def page(run: Run) -> str:
    """All of a run as a page of its own.

    Args:
        run: what was recorded.

    Returns:
        An HTML document that loads nothing from anywhere and runs no script.
    """
    return document(
        f"{run.name}: report of a training",
        [
            table(["", ""], facts(run).items(), left=(0, 1)),
            section("Curves", side_by_side(curves(run))),
            section("How it was run", *_plan(run)),
            section("Predicted and measured", *forecast(run)),
            section("What would help", *advice(run)),
            section("Schedule", *schedule(run)),
            section("Memory", *memory(run)),
            section("Communication", communication(run)),
            section("Workers", *workers(run)),
            section("Samples", *_samples(run)),
            section("What happened", _events(run)),
        ],
    )


def facts(run: Run) -> dict[str, str]:
    """What a run was and came to, by name.

    Args:
        run: what was recorded.
    """
    found = {"state": run.state, "log directory": run.folder}
    if mesh := run.fact("begin", "mesh"):
        found["mesh"] = str(mesh)
    for what, part in (("at the end", run.final), ("while training", run.heldout)):
        if told := _last(part):
            found[f"held out, {what}"] = told
    if told := _last({name: run.train[name] for name in run.train if name in _scores(run)}):
        found["training"] = told
    speed = f"{run.unit}_per_second"
    if values := [value for _, value in run.train.get(speed, []) if value is not None]:
        found["speed"] = f"{short(statistics.median(values))} {run.unit}/s, median of all steps"
    if values := [value for _, value in run.train.get("mfu", []) if value is not None]:
        found["MFU"] = f"{statistics.median(values):.1%}, median of all steps"
    if peak := run.fact("measured", "peak_memory"):
        found["peak memory"] = bytes_text(float(peak))
    if skipped := run.told["skipped"]:
        found["skipped steps"] = f"{len(skipped):,}"
    if spikes := run.told["spike"]:
        found["losses that stood out"] = f"{len(spikes):,}"
    if saved := run.told["checkpoint"]:
        found["newest checkpoint"] = str(saved[max(saved)].get("path", ""))
    if run.unread:
        found["lines that cannot be read"] = f"{run.unread:,}, left out here"
    return found


def _scores(run: Run) -> set[str]:
    """What training is judged by: what held-out data is, or else the loss."""
    return {*run.heldout, *run.final} or {"loss"}


def _last(part: Mapping[str, Any]) -> str:
    """The last value of each curve, in words."""
    told = [(name, points[-1]) for name, points in part.items() if points]
    if not told:
        return ""
    step = max(point[0] for _, point in told)
    values = ", ".join(f"{called(name)} {short(point[1])}" for name, point in told)
    return f"{values} (step {step:,})"


def _plan(run: Run) -> Iterator[str]:
    plan, given = run.pairs("begin", "plan"), run.pairs("begin", "flags")
    tables: list[str] = []
    if plan:
        rows = [(name, text) for name, text in plan.items() if text]
        tables.append(f"<div><h3>Plan</h3>{table(['', ''], rows, (0, 1))}</div>")
    if given:
        rows = [(f"--{name}", value) for name, value in given.items()]
        tables.append(f"<div><h3>Flags that were given</h3>{table(['', ''], rows, (0, 1))}</div>")
    yield side_by_side(tables)
    for rows in run.table("begin", "stages"):
        yield "<h3>Stages</h3>"
        yield table(rows[0], rows[1:], left=(0, 1, len(rows[0]) - 1))
    if run.begins and not run.table("begin", "stages"):
        yield note("Without a pipeline there are no stages.")


def _samples(run: Run) -> Iterator[str]:
    for prompt, text in run.samples[:_MOST]:
        if text.startswith(prompt):
            yield f"<blockquote><b>{escape(prompt)}</b>{escape(text[len(prompt) :])}</blockquote>"
        else:
            yield f"<blockquote><b>{escape(prompt)}</b>\n{escape(text)}</blockquote>"
    if len(run.samples) > _MOST:
        yield note(f"{len(run.samples):,} samples, of which {_MOST} are shown; see {SAMPLES}.")


def _events(run: Run) -> str:
    """Beginnings, skipped steps and the like, in the order of steps."""
    rows: list[tuple[int, str, str]] = []
    for begin in run.begins:
        restored = begin.get("restored")
        told = f"goes on from {restored}" if restored else "begins"
        rows.append((begin["step"], told, _time(begin)))
    shown: dict[str, list[tuple[int, str, str]]] = {}
    for kind in ("skipped", "spike", "unsaved"):
        shown[kind] = [
            (
                step,
                f"{'skipped: ' if kind == 'skipped' else ''}{event.get('why', '')}",
                _time(event),
            )
            for step, event in run.told[kind].items()
        ]
        rows += shown[kind][:_MOST]
    if (end := run.last.get("end")) is not None:
        rows.append((end["step"], str(end.get("reason", "ends")), _time(end)))
    rows.sort(key=lambda row: row[0])
    left_out = sum(max(0, len(each) - _MOST) for each in shown.values())
    told = table(["step", "what", "when"], [(f"{s:,}", what, when) for s, what, when in rows], (1,))
    if left_out:
        told += note(f"Left out here: {count_text(left_out, 'line')}.")
    return told if rows else ""


def _time(event: Mapping[str, Any]) -> str:
    time = event.get("time")
    if not isinstance(time, (int, float)):
        return ""
    when = datetime.datetime.fromtimestamp(time, datetime.timezone.utc)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
