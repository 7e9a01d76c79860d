"""Workers in processes of their own, to be tested with."""

import contextlib
import re
import subprocess
import sys
import threading

COMMAND = [sys.executable, "-m", "pipemesh.cli", "worker"]
SECONDS = 120


def start(*arguments, command=COMMAND):
    """A worker that begins to start."""
    return subprocess.Popen(
        [*command, "--port=0", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def address_of(worker):
    """Waits until it listens."""
    late = threading.Timer(SECONDS, worker.kill)
    late.start()
    try:
        said = ""
        for line in worker.stderr:
            said += line
            if found := re.search(r"pipemesh worker: (\S+:\d+),", line):
                return found[1]
    finally:
        late.cancel()
    raise AssertionError(f"it does not listen: {said}")


@contextlib.contextmanager
def started(number, *arguments):
    """Workers, and their addresses; they are ended in any case."""
    there = [start(*arguments) for _ in range(number)]
    try:
        yield there, [address_of(worker) for worker in there]
    finally:
        for worker in there:
            worker.kill()
            worker.communicate()
