"""Unknown names, answered with the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable

from pipemesh.errors import ScheduleError
from pipemesh.text import did_you_mean


def check_name(what: str, name: str, known: Iterable[str]) -> str:
    """Returns `name` if it is known.

    Args:
        what: what the name is of, for the message.
        name: what the caller wrote.
        known: all names there are.

    Raises:
        ScheduleError: it is not; suggests the nearest and lists all.

    Example:
        >>> check_name("schedule", "gpipe", ["gpipe", "zb_v"])
        'gpipe'
    """
    names = list(known)
    if name in names:
        return name
    hint = did_you_mean(str(name).lower().replace("-", "_"), names, cutoff=0.5)
    raise ScheduleError(f"unknown {what} {name!r}; {hint}known are {', '.join(sorted(names))}")
