"""The curves of one run, or of several over each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pipemesh.report.chart import Series, chart
from pipemesh.report.markup import figure, table
from pipemesh.report.run import Points, Run
from pipemesh.report.scale import Scale, called, short

# What comes first; what is of training alone comes last.
_FIRST = "loss"
_LAST = ("learning_rate", "_per_second", "mfu")
# Speed says the same.
_NO_CURVES = ("seconds",)
# Curves of a run, and what is added to its name in a picture of several runs.
_PARTS: tuple[tuple[Callable[[Run], Mapping[str, Points]], str], ...] = (
    (lambda run: run.train, ""),
    (lambda run: run.heldout, ""),
    (lambda run: run.final, ", at the end"),
)
# Rows of the table that stands for a picture.
_ROWS = 12
# More lines across would hide the curves.
_MOST_NOTES = 12


def curves(run: Run) -> Iterator[str]:
    """A picture of each value: training, held-out data, and the end.

    Args:
        run: what was recorded.
    """
    notes = [(step, "resumed") for step in run.resumed][-_MOST_NOTES:]
    for name in names_of([run]):
        series = [
            Series("training", run.train.get(name, []), 0),
            Series("held out", run.heldout.get(name, []), 1),
            Series("held out, at the end", run.final.get(name, []), 2, marks=True),
        ]
        yield _figure(called(name), [each for each in series if each.values], run.step, notes)


def curves_of(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """A picture of each value with the curves of all runs, training and held-out data apart.

    Of held-out data, rings are the evaluation at the end.

    Args:
        runs: what was recorded.
        names: of the runs.
    """
    until = max(run.step for run in runs)
    for name in names_of(runs):
        training, heldout, final = (
            [
                Series(f"{of}{ending}", part(run).get(name, []), look, marks=bool(ending))
                for look, (of, run) in enumerate(zip(names, runs, strict=True))
            ]
            for part, ending in _PARTS
        )
        shown = {
            where: found
            for where, series in (("training", training), ("held out", [*heldout, *final]))
            if (found := [each for each in series if each.values])
        }
        scale = Scale.of(v for series in shown.values() for each in series for v in each.values)
        for where, series in shown.items():
            rings = "Rings: the evaluation at the end." if series[-1].marks else ""
            title = f"{called(name)}, {where}"
            yield _figure(title, series, until, scale=scale, behind=rings)


def names_of(runs: Sequence[Run]) -> list[str]:
    """The names of all values that are curves, in the order in which they are shown."""
    found = dict.fromkeys(
        name
        for run in runs
        for part in (run.heldout, run.final, run.train)
        for name, points in part.items()
        if name not in _NO_CURVES and any(value is not None for _, value in points)
    )
    return sorted(found, key=lambda name: (name != _FIRST, name.endswith(_LAST)))


def _figure(
    title: str,
    series: Sequence[Series],
    until: int,
    notes: Sequence[tuple[int, str]] = (),
    scale: Scale | None = None,
    behind: str = "",
) -> str:
    picture = chart(title, series, until=until, notes=notes, scale=scale)
    return figure(picture, behind, fold=_table(series))


def _table(series: Sequence[Series]) -> str:
    """Some steps of each curve, as numbers."""
    found: list[dict[int, float | None]] = [dict(each.points) for each in series]
    steps = sorted({step for each in series for step in _some(list(each.points))})
    rows = [
        [f"{step:,}", *(short(each[step]) if step in each else "" for each in found)]
        for step in steps
    ]
    return table(["step", *(each.name for each in series)], rows)


def _some(points: Points) -> list[int]:
    """Steps that are spread evenly, the first and the last among them."""
    if not points:
        return []
    last = len(points) - 1
    chosen = {round(last * number / (_ROWS - 1)) for number in range(_ROWS)}
    return [points[index][0] for index in sorted(chosen)]
