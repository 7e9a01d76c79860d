"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os


def write_whole(path: str, content: bytes) -> None:
    """Writes a file under another name and renames it, so that a kill leaves no half file.

    Args:
        path: the file; its folder is made if it does not exist.
        content: its bytes.
    """
    folder = os.path.dirname(path)
    os.makedirs(folder or ".", exist_ok=True)
    # Not a file of `tempfile`'s, which only its owner may read: log directories are shared.
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
