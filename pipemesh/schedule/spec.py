"""A schedule as a flag, a model's params or a file names it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders import BUILDERS, SLICED, build
from pipemesh.schedule.checks import check_indices, check_type
from pipemesh.schedule.costs import Costs, costs_from_text, costs_to_text
from pipemesh.schedule.csv import from_csv
from pipemesh.schedule.names import FILE, SEARCHED, parse
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate


@dataclasses.dataclass(frozen=True)
class ScheduleSpec:
    """A published schedule, or a table that was read from a file.

    Attributes:
        name: a key of `BUILDERS`, or `file`.
        stages_a_device: how many stages each device owns.
        table: what was read from a file; None for a published schedule.
        num_slices: into how many slices a published schedule cuts sequences.

    Example:
        >>> spec = ScheduleSpec.from_text("interleaved:2")
        >>> spec.stages_a_device, spec.build(num_devices=2, num_microbatches=4).num_stages
        (2, 4)
    """

    name: str
    stages_a_device: int
    table: Schedule | None = None
    num_slices: int = 1

    @classmethod
    def from_text(cls, text: str) -> ScheduleSpec:
        """Parses `1f1b`, `gpipe`, `interleaved:2`, `seq1f1b:4`, `file:mine.csv` and the like.

        Args:
            text: a name as in `pipemesh.schedule.names`; after `file:` the path of a table, as CSV
                or as text.

        Raises:
            ScheduleError: the name is unknown (suggests the nearest), the number is none or not
                open, costs are needed, or the file cannot be read, is no table, or is no valid one.
        """
        parsed = parse(text, for_layers=True)
        if parsed.name == FILE:
            table = read_schedule(parsed.rest)
            return cls(FILE, table.num_stages // table.num_devices, table)
        if parsed.name == SEARCHED:
            raise ScheduleError(
                "schedule 'list_schedule' is searched for costs, and none are given here; write it "
                "with `pipemesh schedule --name list_schedule --costs ... --csv x.csv` and give "
                "'file:x.csv', or pass the table that pipemesh.schedule.list_schedule(...) returns"
            )
        return cls(parsed.name, parsed.stages(), num_slices=parsed.slices())

    def build(self, num_devices: int, num_microbatches: int) -> Schedule:
        """The schedule for so many devices and microbatches.

        Raises:
            ScheduleError: a count is bad, or the file's table is for other counts.
        """
        if self.name in SLICED:
            return build(f"{self.name}:{self.num_slices}", num_devices, num_microbatches)
        if self.table is None:
            open_number = BUILDERS[self.name].takes_virtual_stages
            virtual = self.stages_a_device if open_number else None
            return build(self.name, num_devices, num_microbatches, virtual)
        found = (self.table.num_devices, self.table.num_microbatches)
        if found != (num_devices, num_microbatches):
            raise ScheduleError(
                f"the schedule read from a file has {found[0]} devices and {found[1]} "
                f"microbatches, but {num_devices} devices and {num_microbatches} microbatches are "
                "asked for; use the same counts"
            )
        return self.table

    def for_stages(self, num_stages: int, num_microbatches: int) -> Schedule:
        """The schedule for so many stages and microbatches.

        Raises:
            ScheduleError: a count is bad, the stages cannot be spread over devices, or the file's
                table is for other counts.

        Example:
            >>> ScheduleSpec.from_text("zb_v").for_stages(4, 4).num_devices
            2
        """
        (num_stages,) = check_indices("num_stages", [num_stages])
        if self.table is not None and self.table.num_stages == num_stages:
            return self.build(self.table.num_devices, num_microbatches)
        num_devices, rest = divmod(num_stages, self.stages_a_device)
        if self.table is not None or rest or not num_devices:
            raise ScheduleError(
                f"the schedule has {self.stages_a_device} stages a device, but {num_stages} stages "
                "are asked for, which is no multiple"
                if self.table is None
                else f"the schedule read from a file has {self.table.num_stages} stages, but "
                f"{num_stages} stages are asked for; use the same number"
            )
        return self.build(num_devices, num_microbatches)


# A comment in the text; it keeps the costs that the table was simulated with.
_COSTS = re.compile(r"# costs of an action: (.*)")


def text_with_costs(schedule: Schedule, costs: Costs) -> str:
    """Writes a table as text, with the costs of its actions in a comment before it.

    Example:
        >>> text = text_with_costs(Schedule.from_text("0F0 0B0"), Costs(2, 3))
        >>> text.startswith("# costs of an action: forward=2,backward=3,input_grad=1.5,")
        True
    """
    return f"# costs of an action: {costs_to_text(costs)}\n{schedule.to_text()}\n"


def read_schedule(path: str) -> Schedule:
    """Reads the table of a file without its costs; see `read_table`."""
    return read_table(path)[0]


def read_table(path: str) -> tuple[Schedule, Costs | None]:
    """Reads a file, as `pipemesh schedule` writes it by `--csv` or `--text`.

    Args:
        path: of the file. One whose name ends in `.csv`, or that has no colon, is read as CSV.

    Returns:
        The validated schedule, and the costs of its actions if the file says them. CSV says none,
        because the programs that read it allow no comments.

    Raises:
        ScheduleError: it cannot be read, is no table, or is no valid one.
    """
    file = Path(check_type("path", path, str))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ScheduleError(
            f"cannot read {path}: {reason}; give the path of a file such as `pipemesh schedule` "
            "writes by --csv or --text"
        ) from error
    is_csv = file.suffix.lower() == ".csv" or ":" not in text
    try:
        if is_csv:
            return validate(from_csv(text)), None
        found = _COSTS.search(text)
        costs = costs_from_text(found[1].strip()) if found else None
        schedule = validate(Schedule.from_text(text))
        if costs is not None:
            costs.per_stage(schedule.num_stages)
        return schedule, costs
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
