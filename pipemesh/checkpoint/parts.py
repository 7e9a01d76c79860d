"""A checkpoint of which each of several processes writes a part; the first process joins the parts.

They share a folder on a common file system. File names contain the mark of the attempt, so a part
of an earlier attempt is not taken for a part of this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping

import tensorflow as tf

from pipemesh.backend.processes import Processes
from pipemesh.checkpoint.entries import Snapshot
from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.reader import contents, reason
from pipemesh.checkpoint.workers import join_files, write_tensors
from pipemesh.errors import CheckpointError, SaveError

_DONE, _FAILED = ".done", ".failed"
_PAUSE = 0.05
# The time limit for other parts, after the first process has written its own.
_SECONDS = 600.0


def write_part(folder: str, snapshot: Snapshot, process: int, mark: str) -> None:
    """Writes the part of one process, and then a file that says so."""
    # If it fails, it reports that to the first process and raises the error.
    part = _part(folder, process, mark)
    try:
        if snapshot.names:
            write_tensors("CPU:0", part, snapshot.names, snapshot.specs, snapshot.tensors)
        written = [snapshot.names, [_elements(tensor) for tensor in snapshot.tensors]]
        write_whole(part + _DONE, json.dumps([*written, snapshot.elements]).encode())
    except (OSError, tf.errors.OpError) as error:
        _tell_failure(part, reason(error))
        raise


def join_parts(folder: str, temporary: str, processes: Processes, mark: str) -> None:
    """Waits for the parts of all processes, and makes one checkpoint of them."""
    # Raises a SaveError if a process fails or is late, or if the parts together are incomplete.
    until, parts = time.monotonic() + _SECONDS, []
    written: Counter[str] = Counter()
    whole: dict[str, int | None] = {}
    for process, address in enumerate(processes.addresses):
        part = _part(folder, process, mark)
        while not os.path.exists(part + _DONE):
            if os.path.exists(part + _FAILED):
                with open(part + _FAILED, encoding="utf-8") as file:
                    why = file.read() or "it cannot write the cause: the disk is probably full"
                raise SaveError(f"process {process} ({address}): {why}")
            if time.monotonic() > until:
                raise SaveError(
                    f"process {process} ({address}) has written nothing into {folder} for "
                    f"{_SECONDS:.0f} s; all processes need one log directory, on a file system "
                    "that they share"
                )
            time.sleep(_PAUSE)
        with open(part + _DONE, encoding="utf-8") as file:
            names, elements, all_elements = json.load(file)
        if names:
            parts.append(part)
        for name, number in zip(names, elements, strict=True):
            written[name] += number
        whole |= all_elements
    join_files("CPU:0", parts, temporary)
    try:
        joined = contents(temporary)[0]
    except CheckpointError as error:
        raise SaveError(str(error)) from error
    _check_whole(whole, {name: written[name] for name in joined})


def _check_whole(whole: Mapping[str, int | None], written: Mapping[str, int]) -> None:
    """Checks that each tensor was written with all of its slices."""
    missing = [
        name
        for name, number in whole.items()
        if name not in written or number not in (None, written[name])
    ]
    if missing:
        raise SaveError(
            f"{len(missing)} of {len(whole)} tensors were not completely written by the processes, "
            f"such as {missing[0]!r}"
        )


def _tell_failure(part: str, why: str) -> None:
    """Reports to the first process that a part could not be written, even on a full disk."""
    folder, name = os.path.split(part)
    # The unfinished part itself may fill the disk.
    for file in os.listdir(folder) if os.path.isdir(folder) else []:
        if file.startswith((f"{name}.", f".{name}.")):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, file))
    try:
        write_whole(part + _FAILED, why.encode())
    except OSError:
        # An empty file needs no space for content.
        with contextlib.suppress(OSError), open(part + _FAILED, "xb"):
            pass


def _elements(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() or 0


def _part(folder: str, process: int, mark: str) -> str:
    return os.path.join(folder, f"part-{mark}-{process}")
