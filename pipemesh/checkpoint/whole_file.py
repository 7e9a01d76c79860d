"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os


def write_whole(path: str, content: bytes) -> None:
    """Writes a file under another name and renames it, so that a kill leaves no half file.

    Args:
        path: the file; its folder is made if it does not exist.
        content: its bytes.

    Raises:
        OSError: it cannot be written; its message has the path.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "made", "note")
        >>> write_whole(path, b"whole")
        >>> os.listdir(os.path.dirname(path))
        ['note']
    """
    folder = os.path.dirname(path)
    os.makedirs(folder or ".", exist_ok=True)
    # Not a file of `tempfile`'s, which only its owner may read: log directories are shared.
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:
            # Of a disk that is full, Python does not say which file it was.
            error.filename = path
        raise


def remove_unfinished(folder: str, pattern: str) -> None:
    """Removes what a `write_whole` that was killed has left.

    Args:
        folder: where; it need not exist.
        pattern: of the names of the files that were to be written, such as `vocab-*.model`.
    """
    for path in glob.glob(f".{pattern}.*", root_dir=folder):
        if path.rpartition(".")[2].isdigit():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, path))
