"""The record of a run: one line of JSON per event. Training goes on if it cannot be written."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

FILE = "record.jsonl"
"""The name of the record in a log directory."""

# After the record could not be written.
_STEPS_BETWEEN_TRIES = 100


def to_line(kind: str, values: Mapping[str, Any]) -> str:
    """Returns an event as a line of JSON.

    Args:
        kind: the kind of event, such as `step`.
        values: by name; numbers that are not finite become null, since JSON has none.

    Returns:
        The line without its end.

    Example:
        >>> to_line("step", {"step": 3, "loss": float("nan")})
        '{"event": "step", "step": 3, "loss": null}'
    """
    return json.dumps(_plain({"event": kind, **values}), ensure_ascii=False)


class Record:
    """Appends to the record of a log directory.

    A process that resumes from a checkpoint adds a `begin` with its step: `read` then discards
    the earlier lines of later steps.

    Args:
        folder: the log directory.
        warn: called with a line, once, when the record cannot be written, and when it was removed.
        renew: called before a new file replaces one that was removed; it raises an OSError to
            prevent that.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = Record(folder).add("begin", step=0, time=0)
        >>> with open(os.path.join(folder, FILE)) as file:
        ...     file.read()
        '{"event": "begin", "step": 0, "time": 0}\\n'
    """

    def __init__(
        self,
        folder: str,
        warn: Callable[[str], object] = print,
        renew: Callable[[], object] = lambda: None,
    ) -> None:
        self._path, self._warn, self._renew = os.path.join(folder, FILE), warn, renew
        self._fd: int | None = None
        # The first line of a new file.
        self._begin, self._is_removed = "", False
        self._step, self._again, self._failed = 0, 0, False

    def add(self, kind: str, **values: Any) -> str:
        """Appends a line.

        Args:
            kind: the kind of event.
            **values: by name. The time is added, in seconds since 1970; the default of `step` is
                that of the line before.

        Returns:
            The line.
        """
        self._step = values.setdefault("step", self._step)
        values.setdefault("time", round(time.time(), 3))
        line = to_line(kind, values)
        if kind == "begin":
            self._begin = line
        if self._step >= self._again:
            self._append(line)
        return line

    def _append(self, line: str) -> None:
        try:
            if self._fd is not None and not os.fstat(self._fd).st_nlink:
                os.close(self._fd)
                self._fd, self._is_removed = None, True
            if self._is_removed:
                self._renew()
                # Another process may have made a file in its place.
                self._fd = _open(self._path, os.O_EXCL)
                self._is_removed, line = False, f"{self._begin}\n{line}"
                self._warn(f"{self._path} was removed; later events go into a new one")
            elif self._fd is None:
                self._fd = _open(self._path)
            content = f"{line}\n".encode("utf-8", "backslashreplace")
            if os.write(self._fd, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._fd is not None:
                # Opening the file again ends a line that was written in part.
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                self._fd = None
            self._again = self._step + _STEPS_BETWEEN_TRIES
            if not self._failed:
                self._failed = True
                self._warn(
                    f"{self._path} cannot be written ({error.strerror or error}); training goes on"
                )


def _open(path: str, more_flags: int = 0) -> int:
    """Opens a file to append to, and ends its last line if that was cut short."""
    # O_NONBLOCK: opening a pipe without a reader would wait.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | more_flags
    fd = os.open(path, flags, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def _plain(value: Any) -> Any:
    """Returns a value in the types that JSON has."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): _plain(content) for name, content in items}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in cast("list[Any]", value)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    # A number of NumPy, or anything else as text.
    return _plain(value.item()) if hasattr(value, "item") else str(value)
