"""Processes that end with their parent, and the launcher of workers on one machine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipemesh.errors import DeviceError
from pipemesh.hosts.cluster import Cluster

# Timeout for a reader that has stopped reading.
_SECONDS = 2.0
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


def say(text: str) -> None:
    """Writes a line to standard error, from any thread; loses it if that takes long or fails."""
    left = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        while left and select.select([], [2], [], _SECONDS)[1]:
            left = left[os.write(2, left[: select.PIPE_BUF]) :]


def hold_standard_files() -> None:
    """Opens standard files that were closed at the start: native code writes to their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The system uses the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)


def ends_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` with which the kernel kills a child when this process ends."""
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def death_signal() -> int:
    """Returns the signal that this thread gets when its parent ends; 0 if none."""
    number = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def set_death_signal(number: int) -> None:
    """Sets the signal for this thread, or its successor program, when the parent ends; 0 for none.
    New threads do not inherit it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


# Timeout for a worker to listen: several load TensorFlow at once.
_SECONDS_TO_START = 180
_SECONDS_TO_END = 5
_PAUSE = 0.1
# Limit of starts in a row that end before the worker listens. The client limits restarts of workers
# that listened: it knows whether steps finish in between.
_MOST_STARTS = 5
# A shell reports a signal as 128 plus its number.
_BY_SIGNAL = 128


def launch(words: Sequence[str], processes: int, spares: int, cpu_devices: int) -> int:
    """Starts workers and a command that drives them; returns the exit code of the command."""
    hold_standard_files()
    if not words:
        raise DeviceError(
            "the command is missing; write it behind --, such as -- pipemesh train --model=..."
        )
    workers: list[_Worker] = []
    try:
        workers += [_Worker(number, cpu_devices) for number in range(processes + spares)]
        for worker in workers:
            worker.start()
        limit = time.monotonic() + _SECONDS_TO_START
        addresses = [worker.listens(limit) for worker in workers]
        cluster = Cluster(tuple(addresses[:processes]), tuple(addresses[processes:]))
        return _drive(words, cluster, workers)
    finally:
        for worker in workers:
            worker.end()


@dataclasses.dataclass
class _Worker:
    """A worker process, which ends when its end of a socket pair is closed; if it is stopped, the
    kernel kills it when this process ends.
    """

    number: int
    cpu_devices: int
    address: str = ""
    process: subprocess.Popen[bytes] | None = None
    pair: socket.socket | None = None
    # In a row, that ended before it listened.
    starts: int = 0

    def start(self) -> None:
        """Starts the process, at its earlier address if it had one."""
        if self.pair is not None:
            self.pair.close()
        self.pair, theirs = socket.socketpair()
        port = self.address.rpartition(":")[2] or "0"
        # A terminal's interrupt must not reach workers: the command may need them to save.
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pipemesh", "worker", f"--port={port}"),
                *(f"--cpu_devices={self.cpu_devices}", f"--parent_fd={theirs.fileno()}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            preexec_fn=ends_with_parent(),
        )
        theirs.close()
        self.starts += 1

    def listens(self, limit: float) -> str:
        """Waits until the worker listens, and returns its address."""
        assert self.pair is not None
        received = b""
        while not received.endswith(b"\n"):
            left = max(0.0, limit - time.monotonic())
            ready, _, _ = select.select([self.pair], [], [], left)
            more = self.pair.recv(100) if ready else b""
            if not more:
                why = "has ended" if ready else f"does not listen after {_SECONDS_TO_START} s"
                raise DeviceError(f"worker {self.number} {why}; its messages stand above")
            received += more
        self.address, self.starts = received.decode().strip(), 0
        return self.address

    def keep(self) -> None:
        """Restarts the worker if it has ended."""
        if self.pair is None or self.process is None or self.process.poll() is None:
            return
        # The socket keeps what an ended worker has written.
        ready, _, _ = select.select([self.pair], [], [], 0.0)
        if ready and self.pair.recv(100):
            self.starts = 0
        code, again = self.process.returncode, self.starts < _MOST_STARTS
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        action = "it is started again" if again else "it is not started again"
        say(f"pipemesh launch: worker {self.number} ({self.address}) has ended ({how}); {action}")
        if again:
            self.start()
        else:
            self.process = None

    def end(self) -> None:
        """Ends the worker."""
        if self.pair is not None:
            self.pair.close()
        if self.process is None:
            return
        try:
            self.process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            # The worker is stopped or blocked.
            self.process.kill()
            self.process.wait()


def _drive(words: Sequence[str], cluster: Cluster, workers: Sequence[_Worker]) -> int:
    """Runs the command until it ends; returns its exit code."""
    try:
        command = subprocess.Popen(
            list(words),
            env={**os.environ, "TF_CONFIG": cluster.to_environment()},
            preexec_fn=ends_with_parent(),
        )
    except OSError as error:
        raise DeviceError(f"{words[0]!r} cannot be started ({error.strerror})") from error

    def pass_on(number: int, _frame: Any) -> None:
        # The terminal has sent its interrupt to the command itself.
        if number != signal.SIGINT or not _is_in_foreground():
            command.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        while command.poll() is None:
            time.sleep(_PAUSE)
            for worker in workers:
                worker.keep()
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    code = int(command.returncode)
    return code if code >= 0 else _BY_SIGNAL - code


def _is_in_foreground() -> bool:
    """Returns whether this process and its children are in the foreground of a terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
