"""Copies of text files that TensorFlow cannot read directly, in the user's cache folder.

TensorFlow's `tf.data` does not support zstd. It loses the text after an empty part of a gzip file,
does not notice a truncated one, and holds a whole line in memory. So a file that is packed, or has
a line beyond `LONGEST_LINE` or very many empty ones, is copied once. The copy is plain text, in
which a saved position is a number of bytes.

The name of a copy contains the digest of the text and its own. So every run on that text finds it,
wherever the text lies and however it is packed, and a flipped bit is noticed. It is written under
another name and renamed. The writer holds a lock, which the kernel frees when the process ends. So
only one of several processes writes, and leftovers of a killed process can be told from a file
being written.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
from collections.abc import Iterator
from typing import IO

from pipemesh.data import text_file
from pipemesh.data.text_file import CorpusError, Scan
from pipemesh.text import bytes_text

# Part of the names: raise it if `text_file.lines` changes how it cuts.
_RECIPE = 1
_UNFINISHED = ".part"


def user_cache_dir() -> str:
    """Returns the default folder for learned vocabularies and copies."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(caches, "pipemesh")


def readable(path: str) -> str:
    """Returns the path that TensorFlow reads for a file: the file itself, or a copy that is made if
    missing.

    It raises CorpusError if the file cannot be read or the copy cannot be written.
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
            # Look again under the lock: another process may have written it meanwhile.
            return _find(folder, identity) or _write(path, scan, file, folder, identity)
    except CorpusError:
        raise
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
        # The copy is damaged.
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
    """Opens an empty file for exclusive writing, and removes what remains of it at the end."""
    while True:
        # Lock before truncating: another process may be writing to it.
        with open(path, "ab") as file:
            _lock(file)
            # The earlier lock holder has renamed or removed the file, so this name is a new file.
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
