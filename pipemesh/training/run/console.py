"""Standard streams of a run, the progress of long work, and signals during native code."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from pipemesh.errors import PipemeshError
from pipemesh.hosts import processes

# Seconds between progress updates: each is a line in a log file, and overwrites the last on a
# terminal.
SECONDS_A_REFRESH = {False: 30.0, True: 1.0}
# Seconds that a failed block waits for the other thread.
_GRACE = 10.0
# Shorter waits get no line.
_PATIENCE = {False: 5.0, True: 0.5}

T = TypeVar("T")


class _Steady:
    """A text stream that goes silent, or raises if `ends`, when it cannot be written to."""

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
            reason = getattr(error, "strerror", None) or error
            # Discard what is still buffered, and what native code writes.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for fd in {self._fd, self._stream.fileno()}:
                    os.dup2(nowhere, fd)
                os.close(nowhere)
            if self.ends:
                if isinstance(error, BrokenPipeError):
                    # The reader, such as `head`, has closed the pipe.
                    raise SystemExit(0) from error
                raise PipemeshError(f"standard output cannot be written to ({reason})") from error
            if self._name == "output":
                print(f"standard output is closed ({reason}); going on", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def stand_in() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by streams that do not fail."""
    processes.hold_standard_files()
    # stderr gets its own descriptor: `models` suppresses what native code writes to the other.
    err = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    out = sys.stdout if sys.stdout is not None else open(os.devnull, "w")
    sys.stdout = _Steady(out, 1, "output")
    sys.stderr = _Steady(err, 2, "error")


class Stops:
    """The stop signals in a block: the first is noted, a second one ends the program at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup, SIGHUP stays ignored.
            if signal.getsignal(stop) is not signal.SIG_IGN:
                self._handlers[stop] = signal.signal(stop, self._note)

    def __exit__(self, *_: object) -> None:
        for stop, handler in self._handlers.items():
            signal.signal(stop, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """Returns 0 without a signal, else 128 plus its number, as shells report it."""
        return 0 if self.signal is None else 128 + self.signal


# The real standard output while it carries only objects.
_objects: IO[str] | None = None


def output_matters() -> None:
    """Lets the program end if standard output fails; escapes characters that it cannot encode."""
    if isinstance(sys.stdout, _Steady):
        sys.stdout.ends = True
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None and not has_unicode():
        reconfigure(errors="backslashreplace")


def has_unicode() -> bool:
    """Returns whether standard output can encode all characters."""
    return str(getattr(sys.stdout, "encoding", "")).lower().startswith("utf")


@contextlib.contextmanager
def objects_alone(wanted: bool = True) -> Iterator[None]:
    """Reserves standard output for `say_object` in the block; text goes to standard error."""
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
    """Writes a line to standard output if it is reserved for objects."""
    if _objects is not None:
        _objects.write(f"{line}\n")
        _objects.flush()


@contextlib.contextmanager
def ticking(tick: Callable[[float], None], patience: float, period: float) -> Iterator[None]:
    """Calls `tick` with the elapsed seconds on another thread until the block ends: after
    `patience` seconds, then every `period` seconds.
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
    """Shows on standard error that `what` is being done, and for how long."""
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
            # Return to the start of the line and clear it.
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Runs `work`, which only saves time, beside the block; its errors are dropped."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    with _beside(run):
        yield


@contextlib.contextmanager
def _beside(run: Callable[[], None]) -> Iterator[None]:
    """Runs a function on another thread beside the block, and joins it at the end."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        # The failure may leave the other thread waiting for ever.
        thread.join(_GRACE)
        raise
    thread.join()


def aside(work: Callable[[], T]) -> T:
    """Returns the result of `work`, run on another thread so that signals are handled at once."""
    # Python handles signals on the main thread between two bytecodes: native code that runs there
    # for a minute blocks them.
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    # A wait that ends now and then, in case another thread got the signal.
    while not concurrent.futures.wait([future], timeout=0.5).done:
        pass
    return future.result()


_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """A progress display on standard error; in a log file, a line every 30 seconds."""

    def __init__(self, done: int, total: int) -> None:
        self._terminal = sys.stderr.isatty()
        self._seconds = SECONDS_A_REFRESH[self._terminal]
        self._first = self._done = done
        self._total, self._text = max(total, done), ""
        self._begin = self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._terminal:
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total,
                initial=self._done,
                bar_format=_BAR,
                mininterval=self._seconds,
                file=sys.stderr,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._done > self._first:
            self._tell()

    def advance(self, text: str | None = None) -> None:
        """Counts a step and shows `text` with it; None keeps the text before."""
        self._done += 1
        self._text = self._text if text is None else text
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._told >= self._seconds:
            self._tell()

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Shows `what` as the current work, such as "building the graph", until the block ends."""
        self._text = what
        if self._bar is not None:
            self._bar.set_postfix_str(what)
        with ticking(self._tick, self._seconds, self._seconds):
            yield

    def _tick(self, _seconds: float) -> None:
        if self._bar is not None:
            self._bar.refresh()
        else:
            self._tell()

    def _tell(self) -> None:
        from tqdm import tqdm

        now = self._told = time.monotonic()
        seconds = now - self._begin
        text = f"step {self._done:,} of {self._total:,}, {tqdm.format_interval(seconds)} so far"
        if self._first < self._done < self._total:
            left = seconds / (self._done - self._first) * (self._total - self._done)
            text = f"{text}, {tqdm.format_interval(left)} to go"
        print(f"{text}, {self._text}" if self._text else text, file=sys.stderr, flush=True)
