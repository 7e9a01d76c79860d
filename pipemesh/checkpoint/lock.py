"""One training at a time writes to a folder."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from types import TracebackType

from pipemesh.checkpoint.folder import remove_leftovers
from pipemesh.errors import CheckpointError


class Folder:
    """Holds a folder, as a context manager: made if need be, writable, and nobody else's.

    What a training that was killed has left unfinished is removed. The kernel frees the folder when
    the process ends, however it ends.

    Args:
        path: the folder.
        shared: whether others that share it may hold it, too: several processes say among each
            other which of them writes, and one that was stopped still holds what it held.

    Raises:
        CheckpointError: it is no folder, cannot be written to, or another training holds it.

    Example:
        >>> import tempfile
        >>> with Folder(os.path.join(tempfile.mkdtemp(), "run")) as folder:
        ...     os.path.basename(folder.path)
        'run'
    """

    def __init__(self, path: str, shared: bool = False) -> None:
        self.path, self._shared = path, shared
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
            kind = fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
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
        remove_leftovers(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)
