"""A checkpoint of which each of several processes writes a part, and the first one joins them.

They meet in one folder, on a file system that all of them have.
"""

from __future__ import annotations

import contextlib
import os
import time

import tensorflow as tf

from pipemesh.backend.processes import Processes
from pipemesh.checkpoint.entries import Snapshot
from pipemesh.checkpoint.joined import join_files, write_tensors
from pipemesh.checkpoint.reader import reason
from pipemesh.checkpoint.whole_file import write_whole
from pipemesh.errors import SaveError

_DONE, _FAILED = ".done", ".failed"
_PAUSE = 0.05
# To write a part after the first process has written its own.
_SECONDS = 600.0


def write_part(folder: str, snapshot: Snapshot, process: int) -> None:
    """Writes what one process saves, and then that it has.

    Args:
        folder: of the checkpoint while it is written.
        snapshot: of the process.
        process: its number.

    Raises:
        OSError, tf.errors.OpError: it cannot be written; the first process is told so.
    """
    part = _part(folder, process)
    try:
        if snapshot.names:
            write_tensors("CPU:0", part, snapshot.names, snapshot.specs, snapshot.tensors)
        write_whole(part + _DONE, str(len(snapshot.names)).encode())
    except (OSError, tf.errors.OpError) as error:
        with contextlib.suppress(OSError):
            write_whole(part + _FAILED, reason(error).encode())
        raise


def join_parts(folder: str, temporary: str, processes: Processes) -> None:
    """Waits for the parts of all processes, and makes one checkpoint of them.

    Args:
        folder: of the checkpoint while it is written.
        temporary: what the names of its files are to begin with.
        processes: all of them.

    Raises:
        SaveError: a process could not write its part, or has not.
    """
    until, parts = time.monotonic() + _SECONDS, []
    for process, address in enumerate(processes.addresses):
        part = _part(folder, process)
        while not os.path.exists(part + _DONE):
            if os.path.exists(part + _FAILED):
                with open(part + _FAILED, encoding="utf-8") as file:
                    raise SaveError(f"process {process} ({address}): {file.read()}")
            if time.monotonic() > until:
                raise SaveError(
                    f"process {process} ({address}) has written nothing into {folder} for "
                    f"{_SECONDS:.0f} s; all processes need one log directory, on a file system "
                    "that they share"
                )
            time.sleep(_PAUSE)
        with open(part + _DONE, encoding="utf-8") as file:
            if file.read() != "0":
                parts.append(part)
    join_files("CPU:0", parts, temporary)


def _part(folder: str, process: int) -> str:
    return os.path.join(folder, f"part-{process}")
