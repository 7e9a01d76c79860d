"""A folder of text: which files a pattern means."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

from .text_file import CorpusError, unreadable

_EVERY_FOLDER = "**"
# What gzip and zstd add to a name.
PACKED = (".gz", ".zst")


def check(folder: str) -> None:
    """Checks that a folder has something in it.

    Raises:
        CorpusError: it is missing, no folder, empty, or cannot be listed.
    """
    if not os.path.isdir(folder):
        state = "is a file" if os.path.exists(folder) else "does not exist"
        raise CorpusError(f"--data_dir={folder!r} {state}; give a folder with text files")
    try:
        empty = not os.listdir(folder)
    except OSError as error:
        raise unreadable(folder, error) from error
    if empty:
        raise CorpusError(f"--data_dir={folder!r} is empty; give a folder with text files")


def files(folder: str, *patterns: str) -> list[str]:
    """The files that patterns match, in the order of their names.

    A file that has several names, by symbolic links, is given once. Links to folders are followed,
    names that begin with a dot are not matched by `*`, and folders are left out.

    Args:
        folder: the folder.
        *patterns: globs relative to it; `**` crosses folders.

    Raises:
        CorpusError: they match a link to nothing or what is neither file nor folder, or a file both
            packed and unpacked, or a folder that they cross cannot be listed.
    """
    found: dict[str, str] = {}
    matches = {path for pattern in patterns for path in _matches(folder, pattern)}
    for path in sorted(matches):
        if os.path.isfile(path):
            found.setdefault(os.path.realpath(path), path)
        elif not os.path.isdir(path):
            what = "a link to nothing" if os.path.islink(path) else "no file of text"
            raise CorpusError(
                f"{path!r} is {what}; take it away, or give patterns that do not match it"
            )
    for path in sorted(matches):
        for packed in PACKED:
            if path + packed in matches:
                raise CorpusError(
                    f"{path!r} is there twice, unpacked and packed as {path + packed!r}; take one "
                    "of them away, or give patterns that match one of them"
                )
    return list(found.values())


def _matches(folder: str, pattern: str) -> Iterator[str]:
    """What a pattern matches.

    `glob` itself follows a link to a folder further up again and again when it crosses folders,
    and leaves out what it cannot list.
    """
    before, crosses, after = _split(pattern)
    for match in glob.glob(before, root_dir=folder) if before else [""]:
        path = os.path.join(folder, match)
        if not crosses:
            yield path
        elif os.path.isdir(path):
            for below in _folders(path):
                yield from _matches(below, after or "*")


def _split(pattern: str) -> tuple[str, bool, str]:
    """A pattern before its first `**`, whether there is one, and what follows."""
    parts = pattern.split("/")
    if _EVERY_FOLDER not in parts:
        return pattern, False, ""
    at = parts.index(_EVERY_FOLDER)
    return "/".join(parts[:at]), True, "/".join(parts[at + 1 :])


def _folders(top: str) -> Iterator[str]:
    """A folder and all below it, each once, whatever links lead to it."""
    seen = set()

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    for path, below, _ in os.walk(top, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(path)) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield path
