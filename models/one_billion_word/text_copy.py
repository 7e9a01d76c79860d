"""Copies of files of text that TensorFlow cannot read as they are, in the user's cache folder.

`tf.data` knows no zstd, loses what follows an empty part of a gzip file, does not notice when one
ends too early, and holds a line in memory however long it is. So a file that is packed, has a line
beyond `LONGEST_LINE` or a flood of empty ones is unpacked, cut or thinned once. What is read again
and again is plain text, in which a saved place is a number of bytes.

A copy is named after the text that it was made from and after its own: whoever trains on that text
finds it, wherever the text lies and however it is packed; and a flipped bit is found. It is written
under another name and renamed. Whoever writes holds a lock, which the kernel frees when the process
ends: of two that race one writes, and what a killed one left is told from what is being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
from collections.abc import Iterator
from typing import IO

from pipemesh.partition.text import bytes_text

from . import text_file
from .text_file import CorpusError, Scan

# Goes into the names: raise it when `text_file.lines` cuts otherwise.
_RECIPE = 1
_UNFINISHED = ".part"


def user_cache_dir() -> str:
    """Where learned vocabularies and copies of a user lie unless a folder is given."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "pipemesh")


def readable(path: str) -> str:
    """The path of what TensorFlow is to read of a file: the file itself, or a copy of it.

    The copy is made unless it is there.

    Raises:
        CorpusError: the file cannot be read, or the copy cannot be written.
    """
    scan = text_file.scan(path)
    if scan.packed == text_file.PLAIN and scan.even:
        return path
    folder = os.path.join(user_cache_dir(), "text")
    identity = hashlib.sha256(f"{_RECIPE} {scan.digest}".encode()).hexdigest()[:32]
    try:
        os.makedirs(folder, exist_ok=True)
        _remove_leftovers(folder)
        with _locked(os.path.join(folder, f".{identity}{_UNFINISHED}")) as file:
            # Only now: another process may have written it meanwhile.
            return _find(folder, identity) or _write(path, scan, file, folder, identity)
    except OSError as error:
        raise CorpusError(
            f"{path!r} has to be copied to be read, {bytes_text(scan.size)}, which fails in "
            f"{folder!r} ({error.strerror or error}); make room, or name a folder for caches "
            "by the environment variable XDG_CACHE_HOME"
        ) from error


def _find(folder: str, identity: str) -> str | None:
    for name in glob.glob(f"{identity}-*.txt", root_dir=folder):
        path = os.path.join(folder, name)
        if name == _name(identity, text_file.scan(path).digest):
            return path
        # Damaged.
        os.unlink(path)
    return None


def _write(path: str, scan: Scan, file: IO[bytes], folder: str, identity: str) -> str:
    lines = (line + b"\n" for line in text_file.lines(path))
    found = hashlib.sha256()
    for part in text_file.blocks(path) if scan.even else lines:
        found.update(part)
        file.write(part)
    file.flush()
    if text_file.scan(path) != scan:
        raise CorpusError(f"{path!r} changed while it was read; run again when it is complete")
    copy = os.path.join(folder, _name(identity, found.hexdigest()))
    os.replace(file.name, copy)
    return copy


def _name(identity: str, digest: str) -> str:
    return f"{identity}-{digest[:32]}.txt"


@contextlib.contextmanager
def _locked(path: str) -> Iterator[IO[bytes]]:
    """Opens an empty file for writing that nobody else writes; what is left of it is removed."""
    while True:
        # Not emptied before it is locked: somebody may be writing to it.
        with open(path, "ab") as file:
            _lock(file)
            # Who had the lock before has renamed or removed it: this is another file by now.
            if not _is(path, file):
                continue
            file.truncate(0)
            try:
                yield file
            finally:
                if _is(path, file):
                    os.unlink(path)
            return


def _remove_leftovers(folder: str) -> None:
    for name in glob.glob(f".*{_UNFINISHED}", root_dir=folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            _lock(file, fcntl.LOCK_NB)
            if _is(path, file):
                os.unlink(path)


def _lock(file: IO[bytes], flags: int = 0) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | flags)


def _is(path: str, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
