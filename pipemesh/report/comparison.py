"""The page of several runs side by side."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

from pipemesh.errors import ReportError
from pipemesh.partition.text import bytes_text
from pipemesh.report.chart import MOST_RUNS
from pipemesh.report.curves import curves_of, names_of
from pipemesh.report.markup import document, note, section, side_by_side, table
from pipemesh.report.run import Points, Run
from pipemesh.report.scale import called, short


def comparison(runs: Sequence[Run]) -> str:
    """Several runs as a page: what they came to, what they differ in, curves over each other.

    Args:
        runs: what was recorded, two or more.

    Returns:
        An HTML document that loads nothing from anywhere and runs no script.

    Raises:
        ReportError: there are fewer, or more than can be told apart.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise ReportError(f"{len(runs)} runs cannot be compared; give 2 to {MOST_RUNS}")
    names = _names(runs)
    return document(
        f"Comparison of {', '.join(names)}",
        [
            section("Results", table(["", *names], _results(runs))),
            section("What differs", *_differences(runs, names)),
            section("Curves", side_by_side(curves_of(runs, names))),
        ],
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """What tells the runs apart: the ends of their folders, as short as possible."""
    paths = [os.path.abspath(run.folder).split(os.sep) for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        found = [os.sep.join(path[-length:]) for path in paths]
        if len(set(found)) == len(found):
            return found
    # The same folder twice.
    return [f"{path[-1]} ({number})" for number, path in enumerate(paths, 1)]


def _results(runs: Sequence[Run]) -> Iterator[list[str]]:
    yield ["trained", *(run.name for run in runs)]
    yield ["state", *(run.state for run in runs)]
    for name in names_of(runs):
        title = called(name)
        final: list[Points] = [run.final.get(name, []) for run in runs]
        heldout: list[Points] = [run.heldout.get(name, []) for run in runs]
        if any(final):
            yield [f"{title}, held out, at the end", *map(_last, final)]
        if any(heldout):
            yield [f"{title}, held out, last while training", *map(_last, heldout)]
        if any(heldout) and name == "loss":
            yield [f"{title}, held out, lowest while training", *map(_lowest, heldout)]
        if name.endswith("_per_second") or name == "mfu":
            yield [f"{title}, median", *(_median(run.train.get(name, [])) for run in runs)]
    if not any(run.heldout or run.final for run in runs):
        yield ["loss, training", *(_last(run.train.get("loss", [])) for run in runs)]
    makespans = [run.measured() for run in runs]
    if any(makespans):
        told = [f"{m.makespan:.4g} ms, {m.bubble_ratio:.1%}" if m else "" for m in makespans]
        yield ["makespan and bubble, measured", *told]
    peaks = [run.fact("measured", "peak_memory") for run in runs]
    if any(peaks):
        yield ["peak memory", *(bytes_text(float(peak)) if peak else "" for peak in peaks)]
    yield ["skipped steps", *(f"{len(run.told['skipped']):,}" for run in runs)]


def _last(points: Points) -> str:
    return f"{short(points[-1][1])} (step {points[-1][0]:,})" if points else ""


def _lowest(points: Points) -> str:
    found = [(value, step) for step, value in points if value is not None]
    return f"{short(min(found)[0])} (step {min(found)[1]:,})" if found else ""


def _median(points: Points) -> str:
    values = [value for _, value in points if value is not None]
    return short(statistics.median(values)) if values else ""


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    rows: list[list[str]] = []
    for what, prefix in (("plan", "plan: "), ("flags", "--"), ("versions", "version of ")):
        rows += _rows([run.pairs("begin", what) for run in runs], prefix)
    if rows:
        yield table(["", *names], rows, left=range(len(runs) + 1))
    else:
        yield note("Plan, flags and versions are the same.")


def _rows(values: Sequence[Mapping[str, str]], prefix: str) -> Iterator[list[str]]:
    """Those that are not the same in all runs."""
    for name in dict.fromkeys(name for each in values for name in each):
        found = [each.get(name, "not given" if prefix == "--" else "none") for each in values]
        if len(set(found)) > 1:
            yield [f"{prefix}{name}", *(text or "none" for text in found)]
