"""Files that are there whole or not at all, and paths that TensorFlow can open."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator

from pipemesh.errors import CheckpointError


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Yields the path of a new file, which takes the place of another one at the end of the block;
    an error, or a kill, leaves no partial file there.
    """
    # Not from `tempfile`, whose files only the owner may read: log directories are shared.
    name = f".{os.path.basename(path)}.{os.getpid()}"
    temporary = os.path.join(os.path.dirname(path), name)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_whole(path: str, content: bytes) -> None:
    """Writes a file by `replacing`."""
    # Creates the folder if necessary. An OSError has the path in its message.
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        with replacing(path) as temporary:
            with open(temporary, "wb") as file:
                file.write(content)
    except OSError as error:
        if error.errno and not error.filename:
            # If a disk is full, Python does not name the file.
            error.filename = path
        raise


def remove_unfinished(folder: str, pattern: str) -> None:
    """Removes files that killed `replacing` blocks left, such as `vocab-*.model`."""
    for path in glob.glob(f".{pattern}.*", root_dir=folder):
        if path.rpartition(".")[2].isdigit():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, path))


# TensorFlow's readers treat a path as a pattern; with these characters it does not match itself.
_NOT_ITSELF = re.compile(r"[\[\\]")
_SPECIAL = re.compile(r"[*?\[\]\\]")
_NUMBERED = re.compile(r"ckpt-(\d+)", re.ASCII)


def step_in(path: str) -> int | None:
    """Returns the step in a checkpoint's name, 300 in `ckpt-00000300`; None without one."""
    match = _NUMBERED.fullmatch(os.path.basename(path))
    return int(match[1]) if match else None


def is_pattern(path: str) -> bool:
    """Returns whether TensorFlow, which treats a path as a pattern, finds other files by it."""
    return _NOT_ITSELF.search(path) is not None


def escaped(path: str) -> str:
    """Returns the pattern that matches only this path."""
    return _SPECIAL.sub(r"\\\g<0>", path)


def check_path(path: str) -> None:
    """Checks that TensorFlow can open a path."""
    if "\0" in path:
        raise CheckpointError(f"{path!r} has a NUL character; give another path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{path!r} is not UTF-8, and TensorFlow opens only UTF-8 paths; rename it, or give "
            "another"
        ) from None


def check_name(path: str) -> None:
    """Checks that TensorFlow can read a checkpoint, given without any file ending."""
    check_path(path)
    if is_pattern(os.path.basename(path)):
        raise CheckpointError(
            f"{path!r}: TensorFlow reads no checkpoint with [ or \\ in its own name; give another "
            "name (its folder may have them)"
        )


@contextlib.contextmanager
def literal(path: str) -> Iterator[str]:
    """Yields a path of the same checkpoint that TensorFlow does not treat as a pattern."""
    # It is valid in this process, until the end of the `with` block.
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
