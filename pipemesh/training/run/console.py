"""What training says: lines and progress that nobody need be there to read.

A pipe whose reader left, a terminal that was closed or a full disk behind `> log` must not end a
training. `stand_in` puts streams in place of standard output and error that go quiet instead.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from pipemesh.errors import PipemeshError
from pipemesh.hosts import process

# How often progress is shown: in a log file every time is a line, on a terminal they are one.
SECONDS_A_REFRESH = {False: 30.0, True: 1.0}
# What takes less is not worth a line.
_PATIENCE = {False: 5.0, True: 0.5}
_POLL = 0.05

T = TypeVar("T")


class _Steady:
    """A text stream that goes quiet when it cannot be written to.

    Attributes:
        ends: whether it raises instead, as what is written is all that the program is for.
    """

    ends = False

    def __init__(self, stream: IO[str], fd: int, name: str) -> None:
        self._stream, self._fd, self._name = stream, fd, name
        self._quiet = False

    def write(self, text: str) -> int:
        self._do(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, action: Callable[[], Any]) -> None:
        if self._quiet:
            return
        try:
            action()
        except (OSError, ValueError) as error:
            self._quiet = True
            # What is still buffered, and what native code writes, goes nowhere too.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for fd in {self._fd, self._stream.fileno()}:
                    os.dup2(nowhere, fd)
                os.close(nowhere)
            if self.ends:
                if isinstance(error, BrokenPipeError):
                    # The reader, `head` for example, has seen enough.
                    raise SystemExit(0) from error
                reason = getattr(error, "strerror", None) or error
                raise PipemeshError(f"standard output cannot be written to ({reason})") from error
            if self._name == "output":
                reason = getattr(error, "strerror", None) or error
                print(f"standard output is closed ({reason}); going on", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stand_in() -> None:
    """Puts steady streams in place of `sys.stdout` and `sys.stderr`."""
    process.hold_standard_files()
    # A number of its own for stderr: `models` holds back what native code writes to the other.
    err = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    out = sys.stdout if sys.stdout is not None else open(os.devnull, "w")
    sys.stdout = _Steady(out, 1, "output")
    sys.stderr = _Steady(err, 2, "error")


# Standard output, while it is for objects alone.
_objects: IO[str] | None = None


def output_matters() -> None:
    """Lets the program end if standard output cannot be written to: it is all that is asked for.

    Characters that its encoding lacks are written as escapes.
    """
    if isinstance(sys.stdout, _Steady):
        sys.stdout.ends = True
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and not has_unicode():
        reconfigure(errors="backslashreplace")


def has_unicode() -> bool:
    """Whether standard output has all characters."""
    return str(getattr(sys.stdout, "encoding", "")).lower().startswith("utf")


@contextlib.contextmanager
def objects_alone(wanted: bool = True) -> Iterator[None]:
    """Keeps standard output for `say_object` until the block ends; text goes to standard error.

    Args:
        wanted: whether to; without it, and in a block of another one, nothing changes.
    """
    global _objects
    if not wanted or _objects is not None:
        yield
        return
    _objects, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        _objects, sys.stdout = None, _objects


def say_object(line: str) -> None:
    """Writes a line to standard output if it is for objects, and nothing if it is not."""
    if _objects is not None:
        _objects.write(f"{line}\n")
        _objects.flush()


@contextlib.contextmanager
def ticking(tick: Callable[[float], None], patience: float, period: float) -> Iterator[None]:
    """Calls `tick` with the seconds since the beginning, again and again until the block ends.

    Args:
        tick: called on another thread.
        patience: seconds before the first call.
        period: seconds between calls.
    """
    done = threading.Event()
    begin = time.monotonic()

    def run() -> None:
        pause = patience
        while not done.wait(pause):
            tick(time.monotonic() - begin)
            pause = period

    with _beside(run):
        try:
            yield
        finally:
            done.set()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on standard error that something takes time, and how much it took by now.

    Args:
        what: what is being done, such as "learning the vocabulary".
    """
    terminal = sys.stderr.isatty()
    shown = False

    def tick(seconds: float) -> None:
        nonlocal shown
        shown = True
        text = f"{what}, {seconds:.0f} s"
        sys.stderr.write(f"\r{text}" if terminal else f"{text}\n")
        sys.stderr.flush()

    try:
        with ticking(tick, _PATIENCE[terminal], SECONDS_A_REFRESH[terminal]):
            yield
    finally:
        if shown and terminal:
            # To the line's head, and clear what stands there.
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Calls `work` on another thread while the block runs, and waits for both to end.

    What `work` raises is dropped: it is for what is done again, or is only faster for it.
    """

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    with _beside(run):
        yield


@contextlib.contextmanager
def _beside(run: Callable[[], None]) -> Iterator[None]:
    """Runs something on another thread while the block runs, and waits for it at its end."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def aside(work: Callable[[], T]) -> T:
    """Calls `work` on another thread, so that a signal is answered at once meanwhile.

    Python answers signals on the main thread, between two of its own instructions: native code
    that runs there for a minute makes the program deaf.

    Returns:
        What `work` returns.

    Raises:
        BaseException: what `work` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL)
    if errors:
        raise errors[0]
    return results[0]
