"""Locks: one training at a time writes to a folder, and keeps a checkpoint while it is read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from types import TracebackType

from pipemesh.checkpoint.folder import newest, remove_leftovers
from pipemesh.checkpoint.manifest import INDEX
from pipemesh.checkpoint.paths import check_path
from pipemesh.errors import CheckpointError, SaveError

# The checkpoints that this process reads.
_read: list[int] = []


class Folder:
    """Holds a folder, as a context manager: made if need be, writable, and nobody else's.

    What a training that was killed has left unfinished is removed. The kernel frees the folder when
    the process ends, however it ends.

    Args:
        path: the folder.

    Raises:
        CheckpointError: it is no folder, cannot be written to, another training holds it, or its
            path is not UTF-8.

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
            what = "a file" if os.path.exists(path) else "a link to nothing"
            raise CheckpointError(f"logdir={path!r} is {what}; give a folder")
        try:
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            # The folder itself: a file to lock would lie about.
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
                f"logdir={self.path!r} is in use: another training writes to it; wait for it, "
                "stop it, or give another folder"
            ) from None
        except OSError as error:
            # Some network file systems know no locks.
            print(
                f"logdir={self.path!r} cannot be locked ({error.strerror}); see to it that no "
                "other training writes to it",
                file=sys.stderr,
            )
        _held.append(self)
        remove_leftovers(self.path)
        return self

    def check(self) -> None:
        """Checks that its path still leads to the folder that was locked.

        A new folder in its place is locked, if no other training holds it.

        Raises:
            OSError: it was removed.
            SaveError: another training holds what is in its place.
        """
        if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            return
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise SaveError(
                "the folder was removed, and another training writes to a new one of its name"
            ) from None
        except OSError:
            # That there are no locks was said before.
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
    """Checks a folder as `Folder.check` does, if this process holds it.

    Args:
        path: the folder.

    Raises:
        OSError: it was removed.
        SaveError: another training holds what is in its place.
    """
    for folder in _held:
        if folder.path == path:
            folder.check()


def hold_newest(folder: str) -> str | None:
    """Returns the path of the newest checkpoint of a folder, as `newest`, and holds it.

    A training in the same folder lets go of it only after this process has ended.

    Args:
        folder: where to look.
    """
    before = None
    # Where one was let go of in between there is a newer one.
    while (path := newest(folder)) and not hold(path) and path != before:
        before = path
    return path


def hold(path: str) -> bool:
    """Holds a checkpoint until this process ends; returns whether it is there.

    Args:
        path: of the checkpoint, without any ending.
    """
    try:
        fd = os.open(path + INDEX, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        # Reading it says what is wrong.
        return True
    _read.append(fd)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)
    return os.fstat(fd).st_nlink > 0


@contextlib.contextmanager
def held_by_none(path: str) -> Iterator[bool]:
    """Says whether no process holds a checkpoint; who wants to waits until the end of this.

    Args:
        path: of the checkpoint, without any ending.
    """
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
