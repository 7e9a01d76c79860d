"""Schedules as CSV, in the forms of other libraries.

One line a device, one action a cell; an empty cell is an idle slot and means nothing. `from_csv`
recognizes the form of a file by its cells. A schedule has no communication, so `from_csv` checks
cells for communication against the actions of their row and then leaves them out.

* `compute_only`: actions alone. `torch.distributed.pipelining` loads it and works out sends and
  receives by itself. Recomputations are written as in text (`0R0`); PyTorch refuses them, and the
  other forms have no cells for them.
* `compute_comms`: the same with everything that `torch.distributed.pipelining` does besides, as
  its runtime's `_dump_csv` writes by default. `0SEND_F1` sends what `0F1` made, `1RECV_F1` receives
  it for `1F1`, `SEND_B` and `RECV_B` are for gradients. They are put where
  `pipemesh.schedule.validate` proves that they meet. After the last gradient of a stage,
  `0REDUCE_GRAD` divides the sum of its gradients by the number of microbatches. Cells that gather
  sharded weights (`UNSHARD`, `RESHARD`) are read but not written.
* `zero_bubble`: the output of the zero-bubble authors' scheduler (`to_csv` in `zbv_greedy.py`
  of sail-sg/zero-bubble-pipeline-parallelism): one tick a cell, idle ones empty, with the legs of
  a microbatch's way as letters. `F`, `f` are the forward down and up the V, `B`, `b` the input
  gradient in the order it is done, so of the upper and the lower stage, and `W`, `w` their weight
  gradients. With one stage a device there are only capital letters. There are no whole backwards.

No form has cells for slices: PyTorch reads `0F0.1` as `0F0`. They are written as text
(`Schedule.to_text`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action, parse_cell
from pipemesh.schedule.checks import check_name, check_type
from pipemesh.schedule.schedule import Schedule, from_rows, loop, vee
from pipemesh.schedule.simulate import lockstep
from pipemesh.schedule.validate import Receive, Send, Step, insert_transfers

# PyTorch writes a forward and a backward that overlap as one cell: (0F1;3B0)OVERLAP_F_B.
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_TRANSFER = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})", re.ASCII)
_SHARDS = re.compile(r"(\d{1,9})(?:UNSHARD|RESHARD|REDUCE_GRAD)(?:\d{1,9})?", re.ASCII)
_LEGS = "FfBbWw"
"""The letters of the zero-bubble authors, by the legs of a microbatch's way."""
_LEG = re.compile(rf"([{_LEGS}])(\d{{1,9}})", re.ASCII)
_Line = list[tuple[int, str]]
"""The cells of a line that are not empty, each with its index in the line."""
CSV_FORMS = ("compute_only", "compute_comms", "zero_bubble")
"""The names of the forms."""


def write_csv(schedule: Schedule, form: str = "compute_only") -> str:
    """Writes a schedule in one of the forms of this module.

    Args:
        schedule: any valid schedule; for `zero_bubble` on a V, or with one stage a device, and
            with split backwards.
        form: one of `CSV_FORMS`.

    Returns:
        The content of the file.

    Raises:
        ScheduleError: the form is unknown, the schedule is not valid, or the form cannot express
            it.

    Example:
        >>> from pipemesh.schedule import zb_h1
        >>> print(write_csv(zb_h1(2, 1), "compute_comms"), end="")
        0F0,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD
        1RECV_F0,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD
        >>> print(write_csv(zb_h1(2, 1), "zero_bubble"), end="")
        F0,,,B0,W0
        ,F0,B0,W0,
    """
    check_name("form of CSV", form, CSV_FORMS)
    _check_cells(check_type("schedule", schedule, Schedule).rows, form)
    if form == "compute_only":
        return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)
    if form == "compute_comms":
        return "".join(",".join(_with_sums(row)) + "\n" for row in insert_transfers(schedule))
    return _zero_bubble(schedule)


def from_csv(text: str) -> Schedule:
    """Reads what `write_csv`, PyTorch's `_dump_csv` and the zero-bubble authors' scheduler write.

    PyTorch's cells for overlapped pairs, `(0F1;3B0)OVERLAP_F_B`, become two actions in turn. Its
    cells for communication are checked against the actions around them and left out.

    Args:
        text: the content of the file.

    Returns:
        The schedule, not yet validated; the device that first mentions a stage owns it.

    Raises:
        ScheduleError: a cell is no action, or communication that does not fit (with line and
            column), a stage is never mentioned, or there is no action at all.

    Example:
        >>> print(from_csv("0F0,,0B0\\n,1F0,1B0\\n"))
        0: 0F0 0B0
        1: 1F0 1B0
    """
    check_type("the CSV of a schedule", text, str)
    lines = [_cells(line) for line in io.StringIO(text.removeprefix("\ufeff"))]
    while lines and not lines[-1]:
        lines.pop()
    first = next((cell for line in lines for _, cell in line), "")
    if _LEG.fullmatch(first):
        return from_rows(_rows_of_legs(lines))
    return from_rows([_row(line, number) for number, line in enumerate(lines, start=1)])


def _check_cells(rows: Sequence[Sequence[Action]], form: str) -> None:
    """Rejects slices and, but for `compute_only`, recomputations, for which there are no cells."""
    for action in (action for row in rows for action in row):
        if action.slice is not None or (action.kind == "R" and form != "compute_only"):
            what = "a recomputation" if action.slice is None else "a slice"
            raise ScheduleError(
                f"{action} is {what}, and CSV of the form {form} has no cell for one; write the "
                "table as text (--text, Schedule.to_text), which pipemesh reads"
            )


def _cells(line: str) -> _Line:
    line = line.rstrip("\r\n")
    if '"' in line:
        # Some programs quote every cell. Blanks keep the columns of what is inside.
        line = line.replace('"', " ")
    cells = re.finditer(r"[^,]+", line)
    return [
        (cell.start() + len(cell[0]) - len(cell[0].lstrip()), cell[0].strip())
        for cell in cells
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
    places = {
        (action.stage, "F" if action.kind == "F" else "B", action.microbatch): tick
        for tick, action in enumerate(row)
        if action.kind in "FBI"
    }
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
            raise ScheduleError(f"{where} is twice in this row; drop one of them")
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


def _leg_stages(
    device: int, num_devices: int, num_stages: int
) -> list[tuple[str, tuple[str, int]]]:
    """Returns for each letter of `_LEGS` that a device uses its kind and its stage."""
    if num_stages == num_devices:
        return [(letter, (kind, device)) for letter, kind in zip("FBW", "FIW", strict=True)]
    down, up = device, 2 * num_devices - 1 - device
    stages = (down, up, up, down, up, down)
    return [
        (letter, (kind, stage)) for letter, kind, stage in zip(_LEGS, "FFIIWW", stages, strict=True)
    ]


def _rows_of_legs(lines: list[_Line]) -> list[tuple[Action, ...]]:
    """Reads rows in the letters of the zero-bubble authors; small letters mean a V."""
    is_vee = any(text[0] in "fbw" for line in lines for _, text in line)
    rows: list[tuple[Action, ...]] = []
    for device, line in enumerate(lines):
        meaning = dict(_leg_stages(device, len(lines), len(lines) * (2 if is_vee else 1)))
        row: list[Action] = []
        for start, text in line:
            leg = _LEG.fullmatch(text)
            if leg is None:
                raise ScheduleError(
                    f"line {device + 1}, column {start + 1}: {text!r} is not an action; write one "
                    f"of {_LEGS} and a microbatch, for example 'F0', in every cell"
                )
            kind, stage = meaning[leg[1]]
            row.append(Action(stage, kind, int(leg[2])))
        rows.append(tuple(row))
    return rows


def _with_sums(steps: Sequence[Step]) -> Iterator[str]:
    """Yields the cells of a row, with a `REDUCE_GRAD` after the last gradient of each stage."""
    last = {step.stage: step for step in steps if isinstance(step, Action) and step.kind in "BW"}
    complete: list[str] = []
    for step in steps:
        if isinstance(step, Action):
            # Not before the sends, for which another device waits.
            yield from complete
            complete = [f"{step.stage}REDUCE_GRAD"] if last.get(step.stage) == step else []
        yield _cell(step)
    yield from complete


def _cell(step: Step) -> str:
    if isinstance(step, Action):
        return str(step)
    action = step.action
    way = "F" if action.kind == "F" else "B"
    if isinstance(step, Send):
        return f"{action.stage}SEND_{way}{action.microbatch}"
    assert isinstance(step, Receive)
    stage = action.stage + (1 if way == "F" else -1)
    return f"{stage}RECV_{way}{action.microbatch}"


def _zero_bubble(schedule: Schedule) -> str:
    num_devices = schedule.num_devices
    if schedule.stage_devices not in (loop(num_devices), vee(num_devices)):
        raise ScheduleError(
            f"stages lie on devices {schedule.stage_devices}, but CSV of the form zero_bubble is "
            "for a V or for one stage a device; use compute_only"
        )
    lines: list[str] = []
    for device, row in enumerate(lockstep(schedule)):
        letters = {
            (kind, stage): letter
            for letter, (kind, stage) in _leg_stages(device, num_devices, schedule.num_stages)
        }
        cells: list[str] = []
        for action in row:
            if action is not None and (action.kind, action.stage) not in letters:
                raise ScheduleError(
                    f"device {device}: {action} is a whole backward, and CSV of the form "
                    f"zero_bubble has only {_LEGS}; split it, or use compute_only"
                )
            cells.append(
                f"{letters[action.kind, action.stage]}{action.microbatch}" if action else ""
            )
        lines.append(",".join(cells) + "\n")
    return "".join(lines)
