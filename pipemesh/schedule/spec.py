"""A schedule as a flag, a model's params or a file names it, before its counts are known."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders import SLICED, build
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
        stages_a_device: number of stages of each device.
        table: the table that was read from a file; None for a published schedule.
        num_slices: number of slices into which a published schedule cuts sequences.

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
            ScheduleError: the name is unknown (suggests the nearest), its number is invalid or not
                open, it is that of a search, or the file cannot be read or has no valid table.
        """
        parsed = parse(text, for_layers=True)
        if parsed.name == FILE:
            table, _ = read_table(parsed.rest)
            return cls(FILE, table.num_stages // table.num_devices, table)
        if parsed.name == SEARCHED:
            raise ScheduleError(
                "schedule 'list_schedule' is searched for costs, and none are given here; write it "
                "with `pipemesh schedule --name list_schedule --costs ... --csv x.csv` and give "
                "'file:x.csv', or pass the table that pipemesh.schedule.list_schedule(...) returns"
            )
        return cls(parsed.name, parsed.stages(), num_slices=parsed.slices())

    def build(self, num_devices: int, num_microbatches: int) -> Schedule:
        """Returns the schedule for a number of devices and microbatches.

        Raises:
            ScheduleError: a count is bad, or the file's table is for other counts.
        """
        if self.name in SLICED:
            return build(f"{self.name}:{self.num_slices}", num_devices, num_microbatches)
        if self.table is None:
            return build(self.name, num_devices, num_microbatches, self.stages_a_device)
        counts = self.table.num_devices, self.table.num_microbatches
        if counts != (num_devices, num_microbatches):
            raise ScheduleError(
                f"{num_devices} devices and {num_microbatches} microbatches were requested, but "
                f"the schedule read from a file has {counts[0]} devices and {counts[1]} "
                "microbatches; use the same counts"
            )
        return self.table

    def for_stages(self, num_stages: int, num_microbatches: int) -> Schedule:
        """Returns the schedule for a number of stages and microbatches.

        Raises:
            ScheduleError: a count is bad, the stages cannot be spread over devices, or the file's
                table is for other counts.
        """
        (num_stages,) = check_indices("num_stages", [num_stages])
        if self.table is not None and self.table.num_stages == num_stages:
            return self.build(self.table.num_devices, num_microbatches)
        num_devices, rest = divmod(num_stages, self.stages_a_device)
        if self.table is not None or rest or not num_devices:
            raise ScheduleError(
                f"{num_stages} stages were requested, but the schedule has {self.stages_a_device} "
                f"stages a device; use a multiple of {self.stages_a_device}"
                if self.table is None
                else f"{num_stages} stages were requested, but the schedule read from a file has "
                f"{self.table.num_stages} stages; use the same number"
            )
        return self.build(num_devices, num_microbatches)


# A comment in the text; it keeps the costs that the table was simulated with.
_COSTS = re.compile(r"# costs of an action: (.*)")


def text_with_costs(schedule: Schedule, costs: Costs) -> str:
    """Writes a table as text, with the costs of its actions in a comment before it."""
    return f"# costs of an action: {costs_to_text(costs)}\n{schedule.to_text()}\n"


def read_table(path: str) -> tuple[Schedule, Costs | None]:
    """Reads a file that `pipemesh schedule` wrote by `--csv` or `--text`."""
    # CSV has no costs, because the programs that read it allow no comments.
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
        comment = _COSTS.search(text)
        costs = costs_from_text(comment[1].strip()) if comment else None
        schedule = validate(Schedule.from_text(text))
        if costs is not None:
            costs.per_stage(schedule.num_stages)
        return schedule, costs
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
