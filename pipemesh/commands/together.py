"""What a command that trains does otherwise where several processes run it together.

The first one has the log directory, speaks and writes for all; the others have a folder of their
own for what nobody reads, and write their parts of checkpoints. Without other processes nothing
differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pipemesh.checkpoint import Folder, Manifest, newest_whole
from pipemesh.commands import host_flags
from pipemesh.hosts import client, watch
from pipemesh.training.run.options import Options

T = TypeVar("T")


def is_chief() -> bool:
    """Whether this process is alone, or the first one."""
    found = host_flags.processes()
    return found is None or not found[1]


@contextlib.contextmanager
def folder(path: str) -> Iterator[None]:
    """Holds a log directory for all processes, which have been connected before."""
    if is_chief():
        # One that was lost may hold it as long as it is stopped.
        with Folder(path, shared=host_flags.has_joined()):
            _meet()
            yield
    else:
        _meet()
        yield


def newest(path: str) -> tuple[str, Manifest] | None:
    """The newest whole checkpoint of a log directory, the same for all."""
    if host_flags.processes() is None:
        return newest_whole(path)
    from pipemesh.lowering.simd.process_talk import from_chief

    found = newest_whole(path) if is_chief() else None
    there = from_chief(found[0] if found else None)
    return None if there is None else (there, Manifest.read(there))


def in_turn(work: Callable[[], T]) -> T:
    """What `work` returns; the first process does it before others, and leaves files for them."""
    if is_chief():
        found = work()
        _meet()
        return found
    _meet()
    return work()


@contextlib.contextmanager
def own_options(options: Options) -> Iterator[Any]:
    """What is asked for, with a folder of its own for what is written beside checkpoints.

    At the end of what it is around, all processes wait for each other.
    """
    if is_chief():
        yield options
    else:
        with client.scratch() as scratch:
            yield dataclasses.replace(options, logdir=scratch)
    leave()


def of_chief(path: str) -> str:
    """The path that the first process gives: another one may see a newer checkpoint already."""
    if host_flags.processes() is None:
        return path
    from pipemesh.lowering.simd.process_talk import from_chief

    return from_chief(path) or path


def leave() -> None:
    """Ends what all processes do together; returns when nobody watches the others any more."""
    if host_flags.processes() is None:
        return
    import tensorflow as tf

    _meet()
    watch.stop()
    host_flags.say_ended()
    # Who has ended would look lost. Who knows that all have come leaves, and breaks off the meeting
    # for those who do not know it yet.
    with contextlib.suppress(tf.errors.UnavailableError, tf.errors.CancelledError):
        _meet()


def _meet() -> None:
    if host_flags.processes() is not None:
        from pipemesh.lowering.simd.process_talk import meet

        meet()
