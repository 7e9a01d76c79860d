"""Process utilities: lines on standard error, and an end together with the parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Callable

# Timeout for a reader that has stopped reading.
_SECONDS = 2.0
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


def say(text: str) -> None:
    """Writes a line to standard error, within seconds and without errors.

    Threads that watch workers call it. A line that cannot be written is lost, such as on a full
    disk.
    """
    left = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        while left and select.select([], [2], [], _SECONDS)[1]:
            left = left[os.write(2, left[: select.PIPE_BUF]) :]


def hold_standard_files() -> None:
    """Opens standard files that were closed at the start.

    No other file may get their numbers, because native code and `say` write to the numbers.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The system uses the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)


def ends_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` with which the kernel kills a child when this process ends."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def death_signal() -> int:
    """Returns the signal that this thread gets when its parent ends; 0 if none."""
    number = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def set_death_signal(number: int) -> None:
    """Sets the signal for this thread, or its successor program, when the parent ends; 0 for none.

    New threads do not inherit it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
