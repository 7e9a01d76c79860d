"""Locks: one run at a time writes to a folder, and no run removes a checkpoint that is
being read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType

from pipemesh.checkpoint.files import check_path
from pipemesh.checkpoint.folder import newest, remove_leftovers
from pipemesh.checkpoint.manifest import INDEX
from pipemesh.errors import CheckpointError, SaveError

# Open index files of checkpoints that this process reads.
_read: list[int] = []


class Folder:
    """A lock on a folder, as a context manager: the folder is created, writable and held by this
    run alone.

    Entering removes unfinished files of a killed run. The kernel releases the lock when the process
    ends for any reason.

    Args:
        path: the folder.

    Raises:
        CheckpointError: the path is not a folder, is not writable, is not UTF-8, or another run
            holds it.

    Example:
        >>> import tempfile
        >>> with Folder(os.path.join(tempfile.mkdtemp(), "run")) as folder:
        ...     os.path.basename(folder.path)
        'run'
    """

    def __init__(self, path: str) -> None:
        self.path = path
        check_path(path)
        if os.path.lexists(path) and not os.path.isdir(path):
            kind = "a file" if os.path.exists(path) else "a link to nothing"
            raise CheckpointError(f"logdir={path!r} is {kind}; give a folder")
        try:
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            # Lock the folder itself, to leave no lock file behind.
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                f"logdir={path!r} cannot be written to ({error.strerror}); give another"
            ) from error

    def __enter__(self) -> Folder:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise CheckpointError(
                f"logdir={self.path!r} is in use: another run writes to it; wait for it, "
                "stop it, or give another folder"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            print(
                f"logdir={self.path!r} cannot be locked ({error.strerror}); make sure that no "
                "other run writes to it",
                file=sys.stderr,
            )
        _held.append(self)
        remove_leftovers(self.path)
        return self

    def check(self) -> None:
        """Checks that the path still leads to the locked folder.

        A new folder in its place is locked, if no other run holds it.

        Raises:
            OSError: the folder was removed.
            SaveError: another run holds the folder in its place.
        """
        if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            return
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise SaveError(
                "the folder was removed, and another run writes to a new one of its name"
            ) from None
        except OSError:
            # Without locks, as `__enter__` has reported.
            pass
        os.close(self._fd)
        self._fd = fd

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _held.remove(self)
        os.close(self._fd)


# The folders that this process holds.
_held: list[Folder] = []


def check_held(path: str) -> None:
    """Checks a folder as `Folder.check` does, if this process holds it."""
    for folder in _held:
        if folder.path == path:
            folder.check()


def hold_newest(folder: str) -> str | None:
    """Holds the newest checkpoint of a folder and returns its path, as `newest`."""
    # A run in the same folder removes it only after this process has ended.
    previous = None
    # If a run removes the newest in between, there is a newer one.
    while (path := newest(folder)) and not hold(path) and path != previous:
        previous = path
    return path


def hold(path: str) -> bool:
    """Holds a checkpoint until this process ends; returns whether it exists."""
    try:
        fd = os.open(path + INDEX, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        # Reading it will raise the error.
        return True
    _read.append(fd)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)
    return os.fstat(fd).st_nlink > 0


@contextlib.contextmanager
def held_by_none(path: str) -> Iterator[bool]:
    """Yields whether no process holds a checkpoint; other processes wait for the end."""
    try:
        fd = os.open(path + INDEX, os.O_RDWR)
    except OSError:
        yield True
        return
    is_free = True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_free = False
    except OSError:
        # A file system without locks.
        pass
    try:
        yield is_free
    finally:
        os.close(fd)
