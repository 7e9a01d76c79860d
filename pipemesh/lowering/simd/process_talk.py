"""What processes that run one program tell each other between their steps.

Whoever calls one of these waits until all processes have. Without other processes nothing happens.
"""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf

from pipemesh.backend.processes import current_processes
from pipemesh.errors import DeviceError
from pipemesh.lowering.simd.process_lowering import calls, over_processes


def from_chief(text: str | None) -> str | None:
    """What the first process gives; what others give counts for nothing.

    Args:
        text: anything but "".
    """
    processes = current_processes()
    if processes is None:
        return text
    content = (text or "").encode() if processes.is_chief else b""
    size = int(over_processes(tf.constant(len(content), tf.int32), "max"))
    if not size:
        return None
    numbers = np.zeros([size], np.int32)
    numbers[: len(content)] = np.frombuffer(content, np.uint8)
    found = over_processes(tf.constant(numbers), "max").numpy()
    return found.astype(np.uint8).tobytes().decode()


def highest(number: int) -> int:
    """The greatest number that a process gives."""
    if current_processes() is None:
        return number
    return int(over_processes(tf.constant(number, tf.int32), "max"))


def meet() -> None:
    """Waits until all processes are here."""
    highest(0)


def held_somewhere(held: list[bool]) -> list[bool]:
    """Which of some things any process has.

    Args:
        held: for each whether this one has it; as many in all processes.
    """
    if current_processes() is None or not held:
        return held
    return over_processes(tf.constant(held, tf.int32), "max").numpy().astype(bool).tolist()


def check_alike() -> None:
    """Checks that all processes have built the same collectives in the same order, so far.

    Raises:
        DeviceError: they have not: the next step would wait for ever.
    """
    processes = current_processes()
    if processes is None:
        return
    digest = hashlib.sha256("\n".join(calls()).encode()).digest()[:8]
    mine = tf.constant(np.frombuffer(digest, np.int32) >> 1)
    if bool(tf.reduce_any(over_processes(mine, "max") != over_processes(mine, "min"))):
        raise DeviceError(
            f"process {processes.index} has built {len(calls())} collectives, and not all of the "
            f"{len(processes)} processes have built the same; give all of them the same command, "
            "text and versions"
        )
