"""Progress of a run: a bar on a terminal, an occasional line in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from pipemesh.training.run.console import SECONDS_A_REFRESH, ticking

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Progress:
    """A progress display on standard error.

    In a log file each update is a new line, so there is one every 30 seconds and one at the end.

    Example:
        >>> with Progress(done=2, total=4) as progress:
        ...     progress.advance("loss 2.5")
        ...     progress.advance("loss 2.4")
    """

    def __init__(self, done: int, total: int) -> None:
        self._terminal = sys.stderr.isatty()
        self._seconds = SECONDS_A_REFRESH[self._terminal]
        self._first = self._done = done
        self._total, self._text = max(total, done), ""
        self._begin = self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._terminal:
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
        now = self._told = time.monotonic()
        seconds = now - self._begin
        told = f"step {self._done:,} of {self._total:,}, {tqdm.format_interval(seconds)} so far"
        if self._first < self._done < self._total:
            left = seconds / (self._done - self._first) * (self._total - self._done)
            told = f"{told}, {tqdm.format_interval(left)} to go"
        print(f"{told}, {self._text}" if self._text else told, file=sys.stderr, flush=True)
