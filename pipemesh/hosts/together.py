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
from pipemesh.hosts.children import BY_SIGNAL, ends_with_parent, how, is_of_terminal, say
from pipemesh.hosts.cluster import Cluster

_PAUSE, _SECONDS_TO_END = 0.1, 10.0
# One that is killed so often in a row, each time so soon after its start, is not started again.
_MOST_STARTS, _SOON = 5, 180.0


def run(words: Sequence[str], number: int) -> int:
    """Runs a command so many times at once; each finds the others, and its number, by `TF_CONFIG`.

    One that is killed is started again: the others notice, and begin again by themselves. If one
    ends with an error all of them end.

    Args:
        words: the command and its arguments.
        number: of processes.

    Returns:
        The exit code of the first one that failed; 0 if none did.

    Raises:
        DeviceError: the command cannot be started.
    """
    cluster = Cluster(tuple(f"127.0.0.1:{port}" for port in _free_ports(number)))
    started: dict[int, subprocess.Popen[bytes]] = {}
    starts, since = [0] * number, [0.0] * number

    def start(index: int) -> None:
        try:
            started[index] = subprocess.Popen(
                list(words),
                env={**os.environ, "TF_CONFIG": cluster.to_environment(index)},
                stdin=None if not index else subprocess.DEVNULL,
                preexec_fn=ends_with_parent(),
            )
        except OSError as error:
            raise DeviceError(f"{words[0]!r} cannot be started ({error.strerror})") from error
        since[index], starts[index] = time.monotonic(), starts[index] + 1

    stopped = False

    def hand_on(signal_number: int, _frame: Any) -> None:
        nonlocal stopped
        stopped = True
        # From a terminal all have it already.
        if signal_number != signal.SIGINT or not is_of_terminal():
            for process in started.values():
                process.send_signal(signal_number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, hand_on) for each in signals}
    try:
        for index in range(number):
            start(index)
        while True:
            time.sleep(_PAUSE)
            codes = {index: process.poll() for index, process in started.items()}
            for index, code in codes.items():
                if not code:
                    continue
                if time.monotonic() - since[index] > _SOON:
                    starts[index] = 0
                if code > 0 or stopped or starts[index] == _MOST_STARTS:
                    if code < 0 and not stopped:
                        say(f"process {index} has ended ({how(code)}) for the last time")
                    return _code_of_all(started, code)
                say(f"process {index} has ended ({how(code)}); it is started again")
                start(index)
            if all(code == 0 for code in codes.values()):
                return 0
    finally:
        for process in started.values():
            process.kill()
        for process in started.values():
            process.wait()
        for each, handler in before.items():
            signal.signal(each, handler)


def _code_of_all(started: dict[int, subprocess.Popen[bytes]], code: int) -> int:
    """Gives the others some time to end by themselves: they may have been told to, too."""
    until = time.monotonic() + _SECONDS_TO_END
    for process in started.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
    return code if code >= 0 else BY_SIGNAL - code


def _free_ports(number: int) -> list[int]:
    """Ports that are free now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]
