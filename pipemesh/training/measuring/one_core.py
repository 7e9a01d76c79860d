"""Pins the whole process to one core for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Set

_THREADS = "/proc/self/task"


@contextlib.contextmanager
def one_core() -> Iterator[bool]:
    """Pins all threads of this process to one core; yields False if the system cannot (not Linux).

    New threads inherit the core. At the end all threads get all cores of the process back.

    Example:
        >>> import os, sys
        >>> with one_core() as is_one:
        ...     len(os.sched_getaffinity(0)) == 1 if is_one else sys.platform != "linux"
        True
    """
    if sys.platform != "linux" or not os.path.isdir(_THREADS):
        yield False
        return
    cores = os.sched_getaffinity(0)
    _place({min(cores)})
    try:
        yield True
    finally:
        _place(cores)


def _place(cores: Set[int]) -> None:
    if sys.platform == "linux":
        for thread in map(int, os.listdir(_THREADS)):
            # The thread may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
