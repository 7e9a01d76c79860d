"""Starts a command in several processes of this machine, which compute together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from pipemesh.errors import DeviceError
from pipemesh.hosts.children import (
    BY_SIGNAL,
    STEPS,
    Steps,
    ends_with_parent,
    how,
    is_of_terminal,
    say,
)
from pipemesh.hosts.cluster import Cluster

_PAUSE, _SECONDS_TO_END = 0.1, 10.0
# One that is killed so often in a row, each time so soon after its start and before it has finished
# a step, is not started again.
_MOST_STARTS, _SOON = 5, 180.0
# A command that has this goes on without one that is lost.
ELASTIC = "--elastic"


def run(words: Sequence[str], number: int, spares: int = 0) -> int:
    """Runs a command so many times at once; each finds the others, and its number, by `TF_CONFIG`.

    One that is killed is started again: the others notice, and begin again by themselves. If one
    ends with an error all of them end. Where the others go on without one that is lost, because
    there are spares or by `--elastic`, they end without it, too.

    Args:
        words: the command and its arguments.
        number: of processes.
        spares: how many more, which wait to take the place of one that is lost.

    Returns:
        The exit code of the first one that failed; 0 if none did, or if the others have gone on
        without those.

    Raises:
        DeviceError: the command cannot be started.
    """
    ports = [f"127.0.0.1:{port}" for port in _free_ports(number + spares)]
    cluster = Cluster(tuple(ports[:number]), tuple(ports[number:]))
    together = _Together(words, cluster, spares > 0 or ELASTIC in words)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, together.hand_on) for each in signals}
    try:
        for index in range(number + spares):
            together.start(index)
        while True:
            time.sleep(_PAUSE)
            if (code := together.keep()) is not None:
                return code
    finally:
        together.kill()
        for each, handler in before.items():
            signal.signal(each, handler)


class _Together:
    """The processes.

    Args:
        words: what each of them runs.
        cluster: their addresses.
        lasts: whether the others go on without one that is lost.
    """

    def __init__(self, words: Sequence[str], cluster: Cluster, lasts: bool) -> None:
        self._words, self._cluster, self._lasts = list(words), cluster, lasts
        count = len(cluster.workers) + len(cluster.spares)
        self._steps = [Steps() for _ in range(count)]
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._starts, self._since = [0] * count, [0.0] * count
        # Those that are not started again, and when the first one was done.
        self._gone: dict[int, int] = {}
        self._done: float | None = None
        self._is_stopped = False

    def start(self, index: int) -> None:
        """Starts one."""
        variables = {
            "TF_CONFIG": self._cluster.to_environment(index),
            STEPS: self._steps[index].path,
        }
        try:
            self._started[index] = subprocess.Popen(
                self._words,
                env={**os.environ, **variables},
                stdin=None if not index else subprocess.DEVNULL,
                preexec_fn=ends_with_parent(),
            )
        except OSError as error:
            name = self._words[0]
            raise DeviceError(f"{name!r} cannot be started ({error.strerror})") from error
        self._since[index] = time.monotonic()
        self._starts[index] += 1

    def hand_on(self, signal_number: int, _frame: Any) -> None:
        """Hands a signal on to all."""
        self._is_stopped = True
        # From a terminal all have it already.
        if signal_number != signal.SIGINT or not is_of_terminal():
            for process in self._started.values():
                process.send_signal(signal_number)

    def keep(self) -> int | None:
        """Starts those again that were killed; returns the exit code of all if they have ended."""
        codes = {index: process.poll() for index, process in self._started.items()}
        for index, code in codes.items():
            if not code or index in self._gone:
                continue
            if (ended := self._see_to(index, code)) is not None:
                return ended
        if any(code == 0 for code in codes.values()) and self._done is None:
            self._done = time.monotonic()
        left = [index for index, each in self._started.items() if each.poll() is None]
        if not left:
            return 0 if self._done is not None else _exit_code(next(iter(self._gone.values())))
        if self._lasts and self._done is not None:
            waited = time.monotonic() - self._done
            if waited > _SECONDS_TO_END:
                # One that was stopped sees no end.
                names = ", ".join(map(str, left))
                say(f"the others ended {waited:.0f} s ago, and process {names} did not; killed")
                return 0
        return None

    def _see_to(self, index: int, code: int) -> int | None:
        """Decides what becomes of all when one has ended: their exit code if they end, too."""
        lasted = time.monotonic() - self._since[index]
        if self._steps[index].were_finished() or lasted > _SOON:
            self._starts[index] = 0
        is_last = self._starts[index] == _MOST_STARTS
        if code < 0 and self._lasts and (is_last or self._is_stopped):
            self._gone[index] = code
            if not self._is_stopped:
                say(f"process {index} has ended ({how(code)}) for the last time")
        elif code > 0 or self._is_stopped or is_last:
            if code < 0 and not self._is_stopped:
                say(f"process {index} has ended ({how(code)}) for the last time")
            return _code_of_all(self._started, code)
        else:
            say(f"process {index} has ended ({how(code)}); it is started again")
            self.start(index)
        return None

    def kill(self) -> None:
        """Ends all that are left."""
        for process in self._started.values():
            process.kill()
        for process in self._started.values():
            process.wait()
        for steps in self._steps:
            steps.close()


def _code_of_all(started: dict[int, subprocess.Popen[bytes]], code: int) -> int:
    """Gives the others some time to end by themselves: they may have been told to, too."""
    until = time.monotonic() + _SECONDS_TO_END
    for process in started.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    return _exit_code(code)


def _exit_code(code: int) -> int:
    return code if code >= 0 else BY_SIGNAL - code


def _free_ports(number: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]
