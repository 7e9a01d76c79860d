"""A schedule as a flag or a model's params name it, before devices and microbatches are known."""

from __future__ import annotations

import dataclasses

from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders.registry import BUILDERS, build
from pipemesh.schedule.csv_format import from_csv
from pipemesh.schedule.names import check_name
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate

_ALIASES = {"1f1b": "one_f_one_b", "interleaved": "interleaved_one_f_one_b"}


@dataclasses.dataclass(frozen=True)
class ScheduleSpec:
    """A published schedule, or a table that was read from a file.

    Attributes:
        name: a key of `BUILDERS`, or `file`.
        stages_a_device: how many stages each device owns.
        table: what was read from a file; None for a published schedule.

    Example:
        >>> spec = ScheduleSpec.from_text("interleaved:2")
        >>> spec.stages_a_device, spec.build(num_devices=2, num_microbatches=4).num_stages
        (2, 4)
    """

    name: str
    stages_a_device: int
    table: Schedule | None = None

    @classmethod
    def from_text(cls, text: str) -> ScheduleSpec:
        """Parses `1f1b`, `gpipe`, `interleaved:2`, `zb_v`, `file:mine.csv` and the like.

        Args:
            text: the name of a builder or `1f1b` or `interleaved`, then, after a colon, the
                number of stages a device where the builder leaves it open; or `file:` and the
                path of a table as CSV.

        Raises:
            ScheduleError: the name is unknown (suggests the nearest), the number is none or not
                open, or the file cannot be read, is no table, or is no valid one.
        """
        name, colon, rest = text.partition(":")
        if name == "file":
            table = _read(rest)
            return cls("file", table.num_stages // table.num_devices, table)
        name = _ALIASES.get(name, name)
        check_name("schedule", name, [*BUILDERS, *_ALIASES, "file"])
        builder = BUILDERS[name]
        if not colon:
            return cls(name, builder.virtual_stages)
        if not builder.takes_virtual_stages:
            raise ScheduleError(
                f"schedule {text!r}: {name} has always {builder.virtual_stages} stages a device; "
                f"write {name!r}"
            )
        if not (rest.isascii() and rest.isdigit() and 0 < int(rest[:9]) and len(rest) < 10):
            raise ScheduleError(
                f"schedule {text!r}: {rest!r} is no number of stages a device; write for example "
                f"'{name}:2'"
            )
        return cls(name, int(rest))

    def build(self, num_devices: int, num_microbatches: int) -> Schedule:
        """The schedule for so many devices and microbatches.

        Raises:
            ScheduleError: a count is bad, or the file's table is for other counts.
        """
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


def _read(path: str) -> Schedule:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ScheduleError(
            f"schedule 'file:{path}': cannot read {path!r}: {error}; give the path of a CSV file "
            "such as `pipemesh schedule --csv` writes"
        ) from error
    try:
        return validate(from_csv(text))
    except ScheduleError as error:
        raise ScheduleError(f"schedule 'file:{path}': {error}") from error
