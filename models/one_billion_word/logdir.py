"""The log directory: one training at a time writes to it, and what a killed one left is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
from types import TracebackType

from models.one_billion_word.about import CheckpointError

_INDEX = re.compile(r"ckpt-(\d+)\.index", re.ASCII)
# Nothing else goes: somebody else may keep `ckpt-100.pt` in the same folder.
_PART = re.compile(r"ckpt-(\d+)\.(?:about|data-\d{5}-of-\d{5})", re.ASCII)
# Names under which files are written before they are renamed; see `whole_file.write_whole`.
_UNFINISHED = re.compile(
    r"\.(?:ckpt-\d+\.about|vocab-.*\.model)\.\d+|checkpoint\.tmp[0-9a-f]{32}", re.ASCII
)


class Logdir:
    """Holds a log directory, as a context manager: made if need be, writable, and nobody else's.

    The kernel frees it when the process ends, however it ends.

    Args:
        path: the directory.

    Raises:
        CheckpointError: it is no directory, cannot be written to, or another training holds it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        if os.path.exists(path) and not os.path.isdir(path):
            raise CheckpointError(f"--logdir={path!r} is a file; give a directory")
        try:
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            # The directory itself: a file to lock would lie about.
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                f"--logdir={path!r} cannot be written to ({error.strerror}); give another"
            ) from error

    def __enter__(self) -> Logdir:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise CheckpointError(
                f"--logdir={self.path!r} is in use: another training writes to it; wait for it, "
                "stop it, or give another directory"
            ) from None
        except OSError as error:
            # Some network file systems know no locks.
            print(
                f"--logdir={self.path!r} cannot be locked ({error.strerror}); see to it that no "
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


def latest_checkpoint(logdir: str) -> str | None:
    """Path of the newest complete checkpoint of a directory; None if there is none.

    The index is written last. TensorFlow's own list of checkpoints is written after that, so a
    process killed in between leaves a complete checkpoint that is not listed; and the list still
    names those that someone removed.
    """
    steps = _steps(logdir)
    return os.path.join(logdir, f"ckpt-{max(steps)}") if steps else None


def remove_leftovers(logdir: str) -> None:
    """Removes the parts of checkpoints that were not completed, or whose rest was removed."""
    complete = _steps(logdir)
    for folder in (logdir, os.path.join(logdir, "vocabulary")):
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            path = os.path.join(folder, name)
            part = _PART.fullmatch(name)
            if re.fullmatch(r"ckpt-\d+_temp", name):
                shutil.rmtree(path, ignore_errors=True)
            elif _UNFINISHED.fullmatch(name) or (part and int(part[1]) not in complete):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _steps(logdir: str) -> set[int]:
    names = os.listdir(logdir) if os.path.isdir(logdir) else []
    return {int(match[1]) for name in names if (match := _INDEX.fullmatch(name))}
