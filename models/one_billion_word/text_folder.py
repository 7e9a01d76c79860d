"""A folder of text, and the files that a pattern matches."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

from pipemesh.data.text_file import CorpusError, unreadable

_EVERY_FOLDER = "**"
# Name endings of gzip and zstd.
PACKED = (".gz", ".zst")


def check(folder: str) -> None:
    """Raises CorpusError if a folder is missing, not a folder, empty, or cannot be listed."""
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
    """Returns the files that glob patterns match, sorted by name.

    A file with several names, by symbolic links, is returned once. Links to folders are followed;
    `*` does not match leading dots; folders are omitted. It raises CorpusError for a broken link, a
    special file, a file both packed and unpacked, or a crossed folder that cannot be listed.
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
    """Yields the matches of a pattern.

    Python's `glob` follows a link to a parent folder repeatedly when it crosses folders, and
    silently omits folders that it cannot list.
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
    """Returns a pattern before its first `**`, whether it has one, and the rest."""
    parts = pattern.split("/")
    if _EVERY_FOLDER not in parts:
        return pattern, False, ""
    at = parts.index(_EVERY_FOLDER)
    return "/".join(parts[:at]), True, "/".join(parts[at + 1 :])


def _folders(top: str) -> Iterator[str]:
    """Yields a folder and all folders below it, each once despite links."""
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
