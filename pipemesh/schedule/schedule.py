"""The schedule table: for each device the actions it performs, in order."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action, parse_cell
from pipemesh.schedule.checks import check_counts, check_indices, check_type

_LABEL = re.compile(r"\s*(\d{1,9}):", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of every device, in order.

    A schedule is a value: frozen, comparable, hashable, and its text parses back. Building one
    proves nothing; `pipemesh.schedule.validate` does.

    Attributes:
        rows: for each device its actions in order.
        stage_devices: for each stage the index of the device (the row) that runs it.
        num_microbatches: number of microbatches that flow through every stage.
        num_slices: number of slices into which the sequences of every microbatch are cut; 1 for
            whole sequences. A slice of a stage needs the slices before it (attention reads their
            keys and values), and its gradient those of the slices after it.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> print(gpipe(2, 2))
        0: 0F0 0F1 0B1 0B0
        1: 1F0 1F1 1B1 1B0
    """

    rows: tuple[tuple[Action, ...], ...]
    stage_devices: tuple[int, ...]
    num_microbatches: int
    num_slices: int = 1

    def __post_init__(self) -> None:
        # Lists are welcome; tuples keep the value hashable.
        try:
            rows = tuple(tuple(row) for row in self.rows)
        except TypeError:
            rows = ((self.rows,),)
        for row in rows:
            for strange in set(map(type, row)) - {Action}:
                raise ScheduleError(
                    f"rows hold a {strange.__name__}; they must hold, for each device, its actions "
                    "(Schedule.from_text reads them from text)"
                )
        object.__setattr__(self, "rows", rows)
        devices = check_indices("stage_devices", self.stage_devices)
        object.__setattr__(self, "stage_devices", devices)
        for name in ("num_microbatches", "num_slices"):
            object.__setattr__(self, name, *check_counts(**{name: getattr(self, name)}))
        for stage, device in enumerate(self.stage_devices):
            if not 0 <= device < len(self.rows):
                raise ScheduleError(
                    f"stage {stage} is on device {device}, but there are {len(self.rows)} rows"
                )

    @property
    def num_devices(self) -> int:
        """Number of devices (rows)."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_devices)

    @property
    def num_pieces(self) -> int:
        """Number of microbatches, or of slices of them, that each stage computes."""
        return self.num_microbatches * self.num_slices

    @property
    def is_forward_only(self) -> bool:
        """True if no row holds a backward action, as in a schedule for inference."""
        return not any(action.kind in "BIW" for row in self.rows for action in row)

    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Returns the (stage, piece) pairs that have an `R`; piece `m * num_slices + slice`."""
        return frozenset(
            (action.stage, self.piece(action))
            for row in self.rows
            for action in row
            if action.kind == "R"
        )

    def piece(self, action: Action) -> int:
        """Returns the number of an action's piece: `microbatch * num_slices + slice`."""
        return action.microbatch * self.num_slices + (action.slice or 0)

    def by_pieces(self) -> Schedule:
        """Returns the same table, with each slice as a microbatch of its own.

        Its text is the order of pieces on each stage; it does not say that slices of a
        microbatch need each other.

        Example:
            >>> print(Schedule.from_text("0F0.0 0F0.1 0B0.1 0B0.0").by_pieces())
            0: 0F0 0F1 0B1 0B0
        """
        if self.num_slices == 1:
            return self
        rows = tuple(tuple(self.as_piece(action) for action in row) for row in self.rows)
        return Schedule(rows, self.stage_devices, self.num_pieces)

    def as_piece(self, action: Action) -> Action:
        """Returns an action as it is in `by_pieces`."""
        if self.num_slices == 1:
            return action
        return Action(action.stage, action.kind, self.piece(action))

    def turns_at_once(self) -> frozenset[tuple[int, int]]:
        """Returns the (stage, piece) pairs whose backward follows their forward immediately.

        A piece is numbered as in `recomputed`: without slices it is a microbatch.
        """
        return frozenset(
            (first.stage, self.piece(first))
            for row in self.rows
            for first, second in itertools.pairwise(row)
            if first.kind == "F" and first == second.also("F")
        )

    def only_forward(self) -> Schedule:
        """Returns the forward actions alone, on the same devices, for inference."""
        rows = tuple(tuple(a for a in row if a.kind == "F") for row in self.rows)
        return dataclasses.replace(self, rows=rows)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Returns one line a device, its index, a colon and its actions; `from_text` parses it."""
        return "\n".join(
            f"{device}: {' '.join(map(str, row))}".rstrip() for device, row in enumerate(self.rows)
        )

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parses what `to_text` writes.

        Lines that are blank or start with `#` are skipped, and so are cells that are a single
        `.`, so a figure with idle cells can be typed as it is drawn. The device that first
        mentions a stage owns it; the number of microbatches is one more than the highest, and so
        is that of slices.

        Args:
            text: one line a device; the leading `device:` may be left out on all lines.

        Returns:
            The schedule, not yet validated.

        Raises:
            ScheduleError: a cell is no action, a label is out of turn, a stage is never
                mentioned, or there is no action at all; with line and column.

        Example:
            >>> Schedule.from_text("0: 0F0 .   .   0B0\\n1: .   1F0 1B0").num_stages
            2
        """
        rows: list[tuple[Action, ...]] = []
        lines = check_type("the text of a schedule", text, str).splitlines()
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                rows.append(_parse_row(line, number, len(rows)))
        return from_rows(rows)


def from_rows(rows: Sequence[Sequence[Action]]) -> Schedule:
    """Builds a schedule from rows alone; the device that first mentions a stage owns it."""
    homes: dict[int, int] = {}
    num_microbatches, num_slices = 0, 1
    for device, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.stage, device)
            num_microbatches = max(num_microbatches, action.microbatch + 1)
            num_slices = max(num_slices, (action.slice or 0) + 1)
    if not homes:
        raise ScheduleError("the schedule holds no action; write for example '0: 0F0 0B0'")
    # Not range(max + 1): one typo such as 999999999F0 must not build a huge list.
    for expected, stage in enumerate(sorted(homes)):
        if stage != expected:
            raise ScheduleError(
                f"stage {stage} is mentioned but stage {expected} is not; "
                "stages are numbered from 0 without gaps"
            )
    stage_devices = tuple(homes[stage] for stage in range(len(homes)))
    return Schedule(tuple(map(tuple, rows)), stage_devices, num_microbatches, num_slices)


def _parse_row(line: str, number: int, device: int) -> tuple[Action, ...]:
    label = _LABEL.match(line)
    if label is not None and int(label[1]) != device:
        raise ScheduleError(
            f"line {number}, column {label.start(1) + 1}: the row is labelled {label[1]}, "
            f"but it is the row of device {device}"
        )
    row: list[Action] = []
    for cell in re.finditer(r"\S+", line[label.end() if label else 0 :]):
        start = cell.start() + (label.end() if label else 0)
        if cell[0] != ".":
            row.append(parse_cell(cell[0], number, start))
    return tuple(row)


def loop(num_devices: int, num_virtual_stages: int = 1) -> tuple[int, ...]:
    """Returns the device of each stage on a loop: `0, 1, ..., D - 1, 0, 1, ...`."""
    return tuple(range(num_devices)) * num_virtual_stages


def vee(num_devices: int) -> tuple[int, ...]:
    """Returns the device of each stage on a V: `0, 1, ..., D - 1, D - 1, ..., 1, 0`."""
    # Device 0 has the first and the last stage, so the loss is where its first activations are, and
    # the turn at device `D - 1` needs no transfer.
    return (*range(num_devices), *reversed(range(num_devices)))
