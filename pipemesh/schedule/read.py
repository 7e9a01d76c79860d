"""Reads a table from a file."""

from __future__ import annotations

from pathlib import Path

from pipemesh.errors import ScheduleError
from pipemesh.schedule.schedule import Schedule, from_csv
from pipemesh.schedule.validate import validate


def read_schedule(path: str) -> Schedule:
    """The table in a file, as `pipemesh schedule` writes it by `--csv` or `--text`.

    Args:
        path: of the file. One whose name ends in `.csv`, or that has no colon, is read as CSV.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: it cannot be read, is no table, or is no valid one.
    """
    file = Path(path)
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
        return validate((from_csv if is_csv else Schedule.from_text)(text))
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
