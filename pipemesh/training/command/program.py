"""A program that trains: it ends at once when it is told to, and says what users can mend."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# As `flags` has it, which takes time to import.
_INTERRUPTED = 130


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> NoReturn:
    """Runs a program as a process of its own.

    Args:
        main: gets the command line, returns the exit code. What it raises that users can mend
            becomes one line.
        argv: the command line; by default that of this process.
    """
    # Before all else: imports take seconds.
    signal.signal(signal.SIGINT, _leave)
    # Until the first step little is garbage, and to look for it takes an eighth of the time.
    gc.disable()
    try:
        from pipemesh.training.command import flags
        from pipemesh.training.run import console

        console.stand_in()
        code = flags.exit_code(lambda: main(sys.argv if argv is None else argv))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            # Python writes it.
            raise
        code = end.code or 0
    _end(code)


def _leave(_number: int, _frame: Any) -> NoReturn:
    """Ends the program at once: in the middle of an import an exception might be swallowed."""
    # Not number 2 while native code is held back there, and not `print`, which may be in use.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(_INTERRUPTED)


def _end(code: int) -> NoReturn:
    """Ends the program at once: the system frees all memory, which takes Python seconds."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
