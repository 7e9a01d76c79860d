"""Functions of a process itself: lines on standard error, and an end together with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Callable

# A reader that has stopped reading is not waited for any longer.
_SECONDS = 2.0
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


def say(text: str) -> None:
    """Writes a line to standard error, without failing and within seconds.

    Threads that watch workers call it. A line that cannot be written (a full disk, a pipe without a
    reader) is lost.
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


def ends_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` that lets the kernel kill a child when this process has ended."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def death_signal() -> int:
    """Returns the signal that this thread gets when its parent has ended; 0 if none."""
    number = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def set_death_signal(number: int) -> None:
    """Sets the signal that this thread, or the program that replaces it, gets then; 0 for none.

    A thread does not inherit it from the one that started it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
