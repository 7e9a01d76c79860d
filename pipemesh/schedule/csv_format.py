"""Schedules as CSV, in the format that `torch.distributed.pipelining` loads.

One line a device, one action a cell; an empty cell is an idle slot and means nothing. This is
what PyTorch calls `compute_only`: its loader works out the sends and receives by itself.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action, parse_cell

# PyTorch writes a forward and a backward that overlap as one cell: (0F1;3B0)OVERLAP_F_B.
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def rows_to_csv(rows: Sequence[Sequence[Action]]) -> str:
    """Writes one line a device, its actions separated by commas."""
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def rows_from_csv(text: str) -> list[tuple[Action, ...]]:
    """Reads what `rows_to_csv` and PyTorch's `_dump_csv` write: the actions of each device.

    Raises:
        ScheduleError: a cell is no action (with line and column).
    """
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(io.StringIO(text.removeprefix("\ufeff")), start=1):
        line = line.rstrip("\r\n")
        if '"' in line:
            # Some programs quote every cell. Blanks keep the columns of what is inside.
            line = line.replace('"', " ")
        row: list[Action] = []
        for cell in re.finditer(r"[^,]+", line):
            row += _parse(cell[0], number, cell.start())
        rows.append(tuple(row))
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _parse(cell: str, line: int, start: int) -> list[Action]:
    text = cell.strip()
    start += len(cell) - len(cell.lstrip())
    if not text:
        return []
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        return [parse_cell(pair[k].strip(), line, start + pair.start(k)) for k in (1, 2)]
    if re.fullmatch(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE)\w*", text, re.ASCII):
        raise ScheduleError(
            f"line {line}, column {start + 1}: {text!r} is communication; "
            "give the compute-only form of the schedule"
        )
    return [parse_cell(text, line, start)]
