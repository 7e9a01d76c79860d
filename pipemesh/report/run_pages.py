"""The page of a run, and the page that compares several runs."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pipemesh.errors import ReportError
from pipemesh.report.forecast import advice, forecast
from pipemesh.report.html_page import document, figure, note, section, side_by_side, table
from pipemesh.report.pipeline import communication, memory, schedule, workers
from pipemesh.report.record import SAMPLES, Points, Run
from pipemesh.report.svg import SERIES, Scale, Series, line_chart
from pipemesh.text import bytes_text, count_text, short

# Lines of a kind, and samples, that are shown.
_MOST_LINES = 20
# Runs that colours and dashes tell apart.
_MOST_RUNS = len(SERIES)
# The curve that comes first, those that come last, and one that speed shows already.
_FIRST = "loss"
_LAST = ("gradient_norm", "learning_rate", "_per_second", "mfu")
_NO_CURVES = ("seconds",)
# Rows of the table that stands for a picture.
_ROWS = 12
# More lines across would hide the curves.
_MOST_NOTES = 12


def page(run: Run) -> str:
    """Returns the page of a run.

    Args:
        run: the run.

    Returns:
        An HTML document that loads nothing from anywhere and runs no script.

    Example:
        >>> import tempfile
        >>> from pipemesh.report import Record, page, read
        >>> folder = tempfile.mkdtemp()
        >>> _ = Record(folder).add("begin", step=0, name="Tiny")
        >>> "Tiny: report of a run" in page(read(folder))
        True
    """
    return document(
        f"{run.name}: report of a run",
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
    """Returns the settings and the results of a run by name."""
    texts = {"state": run.state, "log directory": run.folder}
    if mesh := run.fact("begin", "mesh"):
        texts["mesh"] = str(mesh)
    for when, part in (("at the end", run.final), ("while training", run.heldout)):
        if values := _last_values(part):
            texts[f"held out, {when}"] = values
    judged = {*run.heldout, *run.final} or {"loss"}
    if values := _last_values({name: run.train[name] for name in run.train if name in judged}):
        texts["training"] = values
    if (speed := run.median(f"{run.unit}_per_second")) is not None:
        texts["speed"] = f"{short(speed)} {run.unit}/s, median of all steps"
    if (mfu := run.median("mfu")) is not None:
        texts["MFU"] = f"{mfu:.1%}, median of all steps"
    if peak := run.fact("measured", "peak_memory"):
        texts["peak memory"] = bytes_text(float(peak))
    if skipped := run.told["skipped"]:
        texts["skipped steps"] = f"{len(skipped):,}"
    if spikes := run.told["spike"]:
        texts["loss spikes"] = f"{len(spikes):,}"
    if saved := run.told["checkpoint"]:
        texts["newest checkpoint"] = str(saved[max(saved)].get("path", ""))
    if run.unread:
        texts["unreadable lines"] = f"{run.unread:,}, left out here"
    return texts


def _last_values(part: Mapping[str, Points]) -> str:
    """Returns the last value of each curve, in words."""
    last = [(name, points[-1]) for name, points in part.items() if points]
    if not last:
        return ""
    step = max(point[0] for _, point in last)
    values = ", ".join(f"{spoken(name)} {short(point[1])}" for name, point in last)
    return f"{values} (step {step:,})"


def spoken(name: str) -> str:
    """Returns the name of a value for people, such as "learning rate"."""
    return "MFU" if name == "mfu" else name.replace("_", " ")


def _plan(run: Run) -> Iterator[str]:
    """Returns tables of the plan, the flags and the stages."""
    tables: list[str] = []
    if plan := run.pairs("begin", "plan"):
        rows = [(name, text) for name, text in plan.items() if text]
        tables.append(f"<div><h3>Plan</h3>{table(['', ''], rows, (0, 1))}</div>")
    if flags := run.pairs("begin", "flags"):
        rows = [(f"--{name}", value) for name, value in flags.items()]
        tables.append(f"<div><h3>Flags</h3>{table(['', ''], rows, (0, 1))}</div>")
    yield side_by_side(tables)
    for rows in run.table("begin", "stages"):
        yield "<h3>Stages</h3>"
        yield table(rows[0], rows[1:], left=(0, 1, len(rows[0]) - 1))
    if run.begins and not run.table("begin", "stages"):
        yield note("Without a pipeline there are no stages.")


def _samples(run: Run) -> Iterator[str]:
    """Returns decoded texts with their prompts in bold."""
    for prompt, text in run.samples[:_MOST_LINES]:
        if text.startswith(prompt):
            yield f"<blockquote><b>{escape(prompt)}</b>{escape(text[len(prompt) :])}</blockquote>"
        else:
            yield f"<blockquote><b>{escape(prompt)}</b>\n{escape(text)}</blockquote>"
    if len(run.samples) > _MOST_LINES:
        yield note(f"{_MOST_LINES} of {len(run.samples):,} samples; see {SAMPLES} for the others.")


def _events(run: Run) -> str:
    """Returns a table of starts, skipped steps and the like, in the order of steps."""
    rows: list[tuple[int, str, str]] = []
    for begin in run.begins:
        restored = begin.get("restored")
        words = f"resumes from {restored}" if restored else "starts"
        rows.append((begin["step"], words, _time(begin)))
    left_out = 0
    for kind in ("skipped", "spike", "unsaved"):
        prefix = "skipped: " if kind == "skipped" else ""
        events = [
            (step, f"{prefix}{event.get('why', '')}", _time(event))
            for step, event in run.told[kind].items()
        ]
        rows += events[:_MOST_LINES]
        left_out += max(0, len(events) - _MOST_LINES)
    if (end := run.last.get("end")) is not None:
        rows.append((end["step"], str(end.get("reason", "ends")), _time(end)))
    if not rows:
        return ""
    rows.sort(key=lambda row: row[0])
    lines = [(f"{step:,}", what, when) for step, what, when in rows]
    text = table(["step", "what", "when"], lines, (1,))
    return text + (note(f"Left out: {count_text(left_out, 'line')}.") if left_out else "")


def _time(event: Mapping[str, Any]) -> str:
    """Returns the date and time of a line of the record; "" if it has none."""
    time = event.get("time")
    if not isinstance(time, (int, float)):
        return ""
    when = datetime.datetime.fromtimestamp(time, datetime.timezone.utc)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def curves(run: Run) -> Iterator[str]:
    """Draws each value over the steps: training, held-out data, and the end."""
    notes = [(step, "resumed") for step in run.resumed][-_MOST_NOTES:]
    for name in names_of([run]):
        series = [
            Series("training", run.train.get(name, []), 0),
            Series("held out", run.heldout.get(name, []), 1),
            Series("held out, at the end", run.final.get(name, []), 2, marks=True),
        ]
        series = [curve for curve in series if curve.values]
        yield _figure(line_chart(spoken(name), series, until=run.step, notes=notes), series)


def curves_of(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """Draws each value of all runs over each other, training and held-out data apart."""
    until = max(run.step for run in runs)

    def drawn(part: str, name: str, end: str = "", marks: bool = False) -> list[Series]:
        found = [
            Series(f"{title}{end}", getattr(run, part).get(name, []), look, marks=marks)
            for look, (title, run) in enumerate(zip(names, runs, strict=True))
        ]
        return [curve for curve in found if curve.values]

    for name in names_of(runs):
        shown = {
            "training": drawn("train", name),
            "held out": drawn("heldout", name) + drawn("final", name, ", at the end", marks=True),
        }
        values = [v for series in shown.values() for curve in series for v in curve.values]
        for where, series in shown.items():
            if series:
                title = f"{spoken(name)}, {where}"
                picture = line_chart(title, series, until=until, scale=Scale.of(values))
                rings = "Rings: the evaluation at the end." if series[-1].marks else ""
                yield _figure(picture, series, rings)


def names_of(runs: Sequence[Run]) -> list[str]:
    """Returns the names of all values that have curves, in the order of their pictures."""
    names = dict.fromkeys(
        name
        for run in runs
        for part in (run.heldout, run.final, run.train)
        for name, points in part.items()
        if name not in _NO_CURVES and any(value is not None for _, value in points)
    )
    return sorted(names, key=lambda name: (name != _FIRST, name.endswith(_LAST)))


def _figure(picture: str, series: Sequence[Series], caption: str = "") -> str:
    """Returns a picture of curves with a table of some of their values."""
    values = [dict(curve.points) for curve in series]
    steps = sorted({step for curve in series for step in _spread_steps(curve.points)})
    rows = [
        [f"{step:,}", *(short(curve[step]) if step in curve else "" for curve in values)]
        for step in steps
    ]
    return figure(picture, caption, fold=table(["step", *(c.name for c in series)], rows))


def _spread_steps(points: Sequence[tuple[int, float | None]]) -> list[int]:
    """Returns some steps at equal distances, the first and the last among them."""
    last = len(points) - 1
    chosen = {round(last * number / (_ROWS - 1)) for number in range(_ROWS)}
    return [points[index][0] for index in sorted(chosen)]


def comparison(runs: Sequence[Run]) -> str:
    """Returns a page that compares runs: results, differences, and curves over each other.

    Args:
        runs: two or more runs.

    Returns:
        An HTML document that loads nothing from anywhere and runs no script.

    Raises:
        ReportError: there are fewer than two runs, or more than colours tell apart.

    Example:
        >>> import tempfile
        >>> from pipemesh.report import Record, comparison, read
        >>> folders = [tempfile.mkdtemp() for _ in range(2)]
        >>> _ = [Record(folder).add("step", step=1, loss=1.0) for folder in folders]
        >>> "What differs" in comparison([read(folder) for folder in folders])
        True
    """
    if not 2 <= len(runs) <= _MOST_RUNS:
        raise ReportError(f"{len(runs)} runs cannot be compared; give 2 to {_MOST_RUNS}")
    names = _names(runs)
    return document(
        f"Comparison of {', '.join(names)}",
        [
            section("Results", table(["", *names], _results(runs))),
            section("What differs", _differences(runs, names)),
            section("Curves", side_by_side(curves_of(runs, names))),
        ],
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """Returns the ends of the runs' folders, as short as tells them apart."""
    paths = [os.path.abspath(run.folder).split(os.sep) for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        names = [os.sep.join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    # The same folder twice.
    return [f"{path[-1]} ({number})" for number, path in enumerate(paths, 1)]


def _results(runs: Sequence[Run]) -> Iterator[list[str]]:
    """Returns the rows of the table of results."""
    yield ["model", *(run.name for run in runs)]
    yield ["state", *(run.state for run in runs)]
    for name in names_of(runs):
        title = spoken(name)
        final: list[Points] = [run.final.get(name, []) for run in runs]
        heldout: list[Points] = [run.heldout.get(name, []) for run in runs]
        if any(final):
            yield [f"{title}, held out, at the end", *map(_last, final)]
        if any(heldout):
            yield [f"{title}, held out, last while training", *map(_last, heldout)]
        if any(heldout) and name == "loss":
            yield [f"{title}, held out, lowest while training", *map(_lowest, heldout)]
        if name.endswith("_per_second") or name == "mfu":
            medians = [run.median(name) for run in runs]
            yield [f"{title}, median", *("" if m is None else short(m) for m in medians)]
    if not any(run.heldout or run.final for run in runs):
        yield ["loss, training", *(_last(run.train.get("loss", [])) for run in runs)]
    timelines = [run.measured() for run in runs]
    if any(timelines):
        texts = [f"{t.makespan:.4g} ms, {t.bubble_ratio:.1%}" if t else "" for t in timelines]
        yield ["makespan and bubble, measured", *texts]
    peaks = [run.fact("measured", "peak_memory") for run in runs]
    if any(peaks):
        yield ["peak memory", *(bytes_text(float(peak)) if peak else "" for peak in peaks)]
    yield ["skipped steps", *(f"{len(run.told['skipped']):,}" for run in runs)]


def _last(points: Points) -> str:
    return f"{short(points[-1][1])} (step {points[-1][0]:,})" if points else ""


def _lowest(points: Points) -> str:
    known = [(value, step) for step, value in points if value is not None]
    return f"{short(min(known)[0])} (step {min(known)[1]:,})" if known else ""


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Returns a table of the settings that are not the same in all runs."""
    rows: list[list[str]] = []
    for kind, prefix in (("plan", "plan: "), ("flags", "--"), ("versions", "version of ")):
        absent = "not given" if prefix == "--" else "none"
        values = [run.pairs("begin", kind) for run in runs]
        for name in dict.fromkeys(name for of_run in values for name in of_run):
            texts = [of_run.get(name, absent) for of_run in values]
            if len(set(texts)) > 1:
                rows.append([f"{prefix}{name}", *(text or "none" for text in texts)])
    if not rows:
        return note("Plan, flags and versions are the same.")
    return table(["", *names], rows, left=range(len(runs) + 1))
