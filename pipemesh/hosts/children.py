"""Processes that `pipemesh launch` starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

from pipemesh.hosts import silence

# The path of a file that a process writes to when it has finished a step, for its launcher.
STEPS = "PIPEMESH_STEPS"
# A shell reports the number of a signal beyond this.
BY_SIGNAL = 128
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


def ends_with_parent() -> Callable[[], None]:
    """What a process does first that the system is to kill when this one has ended."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def first() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return first


def death_signal() -> int:
    """The signal that this thread gets when its parent has ended; 0 if none."""
    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(found))
    return found.value


def set_death_signal(number: int) -> None:
    """Lets this thread, or the program that takes its place, get a signal then.

    A thread does not have that of the one that started it.

    Args:
        number: of the signal; 0 for none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def say_finished_step() -> None:
    """Tells the launcher of this process, if it has one, that a step was finished."""
    if path := os.environ.get(STEPS):
        # Without it the launcher may give up sooner.
        with contextlib.suppress(OSError), open(path, "wb") as file:
            file.write(b"1")


class Steps:
    """Knows whether a process has finished steps; it says so in memory of this one."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("steps")

    @property
    def path(self) -> str:
        """The value of `STEPS` for the process."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def were_finished(self) -> bool:
        """Whether one was finished since this was asked last."""
        found = os.fstat(self._fd).st_size > 0
        os.ftruncate(self._fd, 0)
        return found

    def close(self) -> None:
        """Frees the memory."""
        os.close(self._fd)


def is_of_terminal() -> bool:
    """Whether this process stands in a terminal's foreground, as those that it has started."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def how(code: int) -> str:
    """How a process has ended.

    Example:
        >>> how(-9)
        'signal SIGKILL'
    """
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def say(text: str) -> None:
    """Writes a line on standard error."""
    silence.say(f"pipemesh launch: {text}")
