"""Files that are there whole or not at all, and paths that TensorFlow can open."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator

from pipemesh.errors import CheckpointError


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


# TensorFlow's readers take a path for a pattern; with these it does not match itself.
_NOT_ITSELF = re.compile(r"[\[\\]")
_SPECIAL = re.compile(r"[*?\[\]\\]")
_NUMBERED = re.compile(r"ckpt-(\d+)", re.ASCII)


def step_in(path: str) -> int | None:
    """Returns the step that the name of a checkpoint says; None if it says none.

    Args:
        path: of the checkpoint, without any ending.

    Example:
        >>> step_in("runs/lm/ckpt-00000300"), step_in("exported/ckpt")
        (300, None)
    """
    match = _NUMBERED.fullmatch(os.path.basename(path))
    return int(match[1]) if match else None


def is_pattern(path: str) -> bool:
    """Returns whether TensorFlow, which takes a path for a pattern, finds other files by it."""
    return _NOT_ITSELF.search(path) is not None


def escaped(path: str) -> str:
    """Returns the pattern that a path alone matches.

    Example:
        >>> print(escaped("runs/lr[0.1]"))
        runs/lr\\[0.1\\]
    """
    return _SPECIAL.sub(r"\\\g<0>", path)


def check_path(path: str) -> None:
    """Checks that TensorFlow can open a path.

    Args:
        path: of a folder of checkpoints.

    Raises:
        CheckpointError: it cannot.
    """
    if "\0" in path:
        raise CheckpointError(f"{path!r} has a NUL character; give another path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{path!r} is not UTF-8, and TensorFlow opens no other paths; rename it, or give "
            "another"
        ) from None


def check_name(path: str) -> None:
    """Checks that TensorFlow can read a checkpoint.

    Args:
        path: of the checkpoint, without any ending.

    Raises:
        CheckpointError: it cannot.
    """
    check_path(path)
    if is_pattern(os.path.basename(path)):
        raise CheckpointError(
            f"{path!r}: TensorFlow reads no checkpoint with [ or \\ in its own name; give another "
            "name (its folder may have them)"
        )


@contextlib.contextmanager
def literal(path: str) -> Iterator[str]:
    """Gives a path of the same checkpoint that TensorFlow takes for no pattern.

    It is good for this process, until the end of the `with` block.

    Args:
        path: of the checkpoint, without any ending.

    Raises:
        CheckpointError: TensorFlow cannot read it under any path.
    """
    check_name(path)
    folder, name = os.path.split(path)
    if not is_pattern(folder) or not os.path.isdir(folder):
        yield path
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
