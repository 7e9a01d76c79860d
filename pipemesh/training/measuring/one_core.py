"""Keeps a whole process on one core for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Set

_THREADS = "/proc/self/task"


@contextlib.contextmanager
def one_core() -> Iterator[bool]:
    """All threads of this process share one core; what they compute takes as long as it is much.

    Threads that start meanwhile do, too, as they have the cores of the thread that starts them;
    they are given all cores of the process with the others in the end.

    Yields:
        Whether it is so: only Linux can do it.

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
            # It may have ended since.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)
