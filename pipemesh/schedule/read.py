"""Tables in files."""

from __future__ import annotations

import re
from pathlib import Path

from pipemesh.errors import ScheduleError
from pipemesh.schedule.checks import check_type
from pipemesh.schedule.cost_text import costs_from_text, costs_to_text
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule, from_csv
from pipemesh.schedule.validate import validate

# A comment for whoever reads the text; it keeps what the table was simulated with.
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
