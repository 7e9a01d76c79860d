"""Schedules as CSV: what others write is read, in the forms that `csv_forms` names.

One line a device, one action a cell; an empty cell is an idle slot and means nothing. Which form
a file has follows from its cells. A schedule says nothing of communication, so cells that do are
checked against the actions of their row and then left out.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action, parse_cell

# PyTorch writes a forward and a backward that overlap as one cell: (0F1;3B0)OVERLAP_F_B.
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_TRANSFER = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)
_SHARDS = re.compile(r"(\d{1,9})(?:UNSHARD|RESHARD|REDUCE_GRAD)(?:\d{1,9})?", re.ASCII)
LEGS = "FfBbWw"
"""The letters of the zero-bubble authors, by the legs of a microbatch's way."""
_LEG = re.compile(rf"([{LEGS}])(\d{{1,9}})", re.ASCII)


def check_cells(rows: Sequence[Sequence[Action]], form: str) -> None:
    """Refuses actions that a form of CSV has no cells for.

    Raises:
        ScheduleError: an action is for a slice, which PyTorch would take for all of its microbatch,
            or recomputes, in another form than `compute_only`.
    """
    for action in (action for row in rows for action in row):
        if action.slice is not None or (action.kind == "R" and form != "compute_only"):
            what = "a recomputation" if action.slice is None else "a slice"
            raise ScheduleError(
                f"{action} is {what}, and CSV of the form {form} has no cell for one; write the "
                "table as text (--text, Schedule.to_text), which pipemesh reads"
            )


def rows_to_csv(rows: Sequence[Sequence[Action]]) -> str:
    """Writes one line a device, its actions separated by commas: the form `compute_only`."""
    check_cells(rows, "compute_only")
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def rows_from_csv(text: str) -> list[tuple[Action, ...]]:
    """Reads every form of `pipemesh.schedule.csv_forms`: the actions of each device.

    Raises:
        ScheduleError: a cell is no action, or it is communication that does not fit the actions of
            its row (with line and column).
    """
    lines = [_cells(line) for line in io.StringIO(text.removeprefix("\ufeff"))]
    while lines and not lines[-1]:
        lines.pop()
    first = next((cell for line in lines for _, cell in line), "")
    if _LEG.fullmatch(first):
        return _rows_of_legs(lines)
    return [_row(line, number) for number, line in enumerate(lines, start=1)]


_Line = list[tuple[int, str]]
"""The cells of a line that are not empty, each with its index in the line."""


def _cells(line: str) -> _Line:
    line = line.rstrip("\r\n")
    if '"' in line:
        # Some programs quote every cell. Blanks keep the columns of what is inside.
        line = line.replace('"', " ")
    found = re.finditer(r"[^,]+", line)
    return [
        (cell.start() + len(cell[0]) - len(cell[0].lstrip()), cell[0].strip())
        for cell in found
        if cell[0].strip()
    ]


def _row(line: _Line, number: int) -> tuple[Action, ...]:
    row: list[Action] = []
    others: list[tuple[int, int, str]] = []
    for start, text in line:
        pair = _PAIR.fullmatch(text)
        if pair is not None:
            row += [parse_cell(pair[k].strip(), number, start + pair.start(k)) for k in (1, 2)]
        elif _TRANSFER.fullmatch(text) or _SHARDS.fullmatch(text):
            others.append((len(row), start, text))
        else:
            row.append(parse_cell(text, number, start))
    places = {(a.stage, "F" if a.kind == "F" else "B", a.microbatch): t for t, a in _senders(row)}
    stages = {action.stage for action in row}
    seen: set[str] = set()
    for place, start, text in others:
        where = f"line {number}, column {start + 1}: {text!r}"
        transfer = _TRANSFER.fullmatch(text)
        if transfer is None:
            shards = _SHARDS.fullmatch(text)
            if shards is not None and int(shards[1]) not in stages:
                raise ScheduleError(f"{where} is for a stage that this device does not run")
            continue
        if text in seen:
            raise ScheduleError(f"{where} stands twice in this row; drop one of them")
        seen.add(text)
        stage, what, way, microbatch = transfer.groups()
        tick = places.get((int(stage), way, int(microbatch)))
        sends = what == "SEND"
        if tick is None or (tick < place) != sends:
            action = f"{stage}F{microbatch}" if way == "F" else f"{stage}B{microbatch} or its I"
            raise ScheduleError(
                f"{where} {'sends' if sends else 'receives'}, but this device has no {action} "
                f"{'before' if sends else 'after'} it"
            )
    return tuple(row)


def _senders(row: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    return ((tick, action) for tick, action in enumerate(row) if action.kind in "FBI")


def leg_stages(device: int, num_devices: int, num_stages: int) -> list[tuple[str, tuple[str, int]]]:
    """For each letter of `LEGS` that a device uses the kind and the stage that it stands for.

    Example:
        >>> leg_stages(0, 2, 2)
        [('F', ('F', 0)), ('B', ('I', 0)), ('W', ('W', 0))]
        >>> leg_stages(0, 2, 4)[2:4]
        [('B', ('I', 3)), ('b', ('I', 0))]
    """
    if num_stages == num_devices:
        return [(letter, (kind, device)) for letter, kind in zip("FBW", "FIW", strict=True)]
    down, up = device, 2 * num_devices - 1 - device
    stages = (down, up, up, down, up, down)
    return [
        (letter, (kind, stage)) for letter, kind, stage in zip(LEGS, "FFIIWW", stages, strict=True)
    ]


def _rows_of_legs(lines: list[_Line]) -> list[tuple[Action, ...]]:
    """Rows in the letters of the zero-bubble authors; small ones tell that it is a V."""
    is_vee = any(text[0] in "fbw" for line in lines for _, text in line)
    rows: list[tuple[Action, ...]] = []
    for device, line in enumerate(lines):
        meaning = dict(leg_stages(device, len(lines), len(lines) * (2 if is_vee else 1)))
        row: list[Action] = []
        for start, text in line:
            leg = _LEG.fullmatch(text)
            if leg is None:
                raise ScheduleError(
                    f"line {device + 1}, column {start + 1}: {text!r} is no action; write one of "
                    f"{LEGS} and a microbatch, for example 'F0', in every cell"
                )
            kind, stage = meaning[leg[1]]
            row.append(Action(stage, kind, int(leg[2])))
        rows.append(tuple(row))
    return rows
