"""Standard error: lines that hold nothing up, and silence where one process speaks for all."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO

# A reader that has stopped reading is not waited for any longer.
_SECONDS = 2.0
_heard: list[TextIO] = []


def say(text: str) -> None:
    """Writes a line to standard error, in silence, too.

    Threads that watch others call it, so it never fails, and waits for seconds at most. A line that
    cannot be written (a full disk, a pipe without a reader) is lost.
    """
    left = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        while left and select.select([], [2], [], _SECONDS)[1]:
            left = left[os.write(2, left[: select.PIPE_BUF]) :]


def hold_standard_files() -> None:
    """Opens standard files that were closed from the beginning.

    No other file may get their numbers: native code, and `say`, write to the numbers.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)


def be_silent() -> None:
    """Lets this process say no more what the first one says, too; see `speak`."""
    _heard[:] = [sys.stdout, sys.stderr]
    nowhere = open(os.devnull, "w", encoding="utf-8")
    sys.stdout = sys.stderr = nowhere


def speak() -> None:
    """Lets it say again what it has to: an error."""
    if _heard:
        sys.stdout.close()
        sys.stdout, sys.stderr = _heard
        _heard.clear()


def is_silent() -> bool:
    """Whether this process says nothing now."""
    return bool(_heard)
