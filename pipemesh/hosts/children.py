"""Processes that `pipemesh launch` starts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

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
    print(f"pipemesh launch: {text}", file=sys.stderr, flush=True)
