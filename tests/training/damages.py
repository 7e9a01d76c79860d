"""Kinds of damage to the checkpoints of a log directory, and how a training takes each.

A folder has the checkpoints of steps 2, 3 and 4 when it is harmed. A training either goes on, and
ends as one that nobody disturbed, or refuses to begin, in one line.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable

ENDS = ("index", "data-00000-of-00001", "manifest")
INDEX, DATA, MANIFEST = ENDS


@dataclasses.dataclass(frozen=True)
class Damage:
    """A kind of damage."""

    name: str
    # Does it to a folder.
    harm: Callable[[pathlib.Path], object]
    # The report on standard error, as a regular expression; "" for none.
    told: str
    # The step from which the run resumes; None if it refuses.
    first: int | None = 3


def _file(folder, end, step=4):
    return folder / f"ckpt-{step}.{end}"


def _flip(path, where):
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def _each(harm, *ends):
    """Harms files of the newest checkpoint."""
    return lambda folder: [harm(_file(folder, end)) for end in ends]


def _cut(path):
    os.truncate(path, path.stat().st_size // 2)


def _lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def _replaced(make):
    def harm(path):
        path.unlink()
        make(path)

    return harm


def _edit(**changes):
    """Changes the manifest, and its digest with it."""

    def harm(path):
        values = json.loads(path.read_bytes().partition(b"\n")[2]) | changes
        content = json.dumps(values).encode()
        path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

    return harm


def _move(old, new, *ends, do=os.replace):
    return lambda folder: [do(_file(folder, end, old), _file(folder, end, new)) for end in ends]


def _exchange(*ends):
    def harm(folder):
        for old, new in ((4, 99), (3, 4), (99, 3)):
            _move(old, new, *ends)(folder)

    return harm


def _leave_unfinished(folder):
    temporary = folder / "ckpt-5_temp"
    temporary.mkdir()
    shutil.copy(_file(folder, DATA), temporary / f"ckpt-5.{DATA}")
    shutil.copy(_file(folder, DATA), _file(folder, DATA, 5))


def _harm_all(folder):
    for step in (2, 3, 4):
        _cut(_file(folder, DATA, step))


_RENAMED = "and its files were renamed; set aside"
_NOT_WRITTEN = "has changed since it was written; set aside"

DAMAGES = [
    Damage("data cut short", _each(_cut, DATA), r"data-.* bytes of .*; set aside"),
    Damage("data empty", _each(lambda path: os.truncate(path, 0), DATA), "has 0 bytes of"),
    Damage("data too long", _each(_lengthen, DATA), r"data-.* bytes of .*; set aside"),
    Damage("data with a flipped bit", _each(lambda path: _flip(path, 0), DATA), "cannot be read"),
    Damage("data removed", _each(os.unlink, DATA), "is missing; set aside"),
    Damage("data a folder", _each(_replaced(os.mkdir), DATA), "is a folder; set aside"),
    Damage(
        "data a link to nothing",
        _each(_replaced(lambda path: path.symlink_to("nothing")), DATA),
        "is missing; set aside",
    ),
    *(
        Damage(
            f"{end.partition('-')[0]} a link to itself",
            _each(_replaced(lambda path: path.symlink_to(path.name)), end),
            r"cannot be read \(Too many levels of symbolic links\)",
            None,
        )
        for end in ENDS
    ),
    Damage("index cut short", _each(_cut, INDEX), _NOT_WRITTEN),
    Damage("index with a flipped bit", _each(lambda path: _flip(path, 0.5), INDEX), _NOT_WRITTEN),
    Damage("index removed", _each(os.unlink, INDEX), "is missing; set aside"),
    Damage("index a folder", _each(_replaced(os.mkdir), INDEX), "is a folder; set aside"),
    Damage("manifest empty", _each(lambda path: os.truncate(path, 0), MANIFEST), _NOT_WRITTEN),
    Damage("manifest with a flipped bit", _each(lambda p: _flip(p, 0.9), MANIFEST), _NOT_WRITTEN),
    Damage("manifest removed", _each(os.unlink, MANIFEST), "is missing; set aside"),
    Damage("manifest of another step", _each(_edit(step=9999), MANIFEST), _RENAMED),
    Damage(
        "manifest of another version",
        _each(_edit(step="4"), MANIFEST),
        r"has another version \(its step is '4'\)",
        None,
    ),
    Damage("renamed", _move(4, 500, *ENDS), _RENAMED),
    Damage("an older one copied", _move(3, 500, *ENDS, do=shutil.copy), _RENAMED, 4),
    Damage("two exchanged", _exchange(*ENDS), _RENAMED, 2),
    Damage("data of two exchanged", _exchange(DATA), "set aside as damaged-ckpt-3", 2),
    Damage("manifests of two exchanged", _exchange(MANIFEST), _RENAMED, 2),
    Damage("the newest removed", _each(os.unlink, *ENDS), ""),
    Damage("the list removed", lambda folder: (folder / "checkpoint").unlink(), "", 4),
    Damage("one left unfinished", _leave_unfinished, "", 4),
    Damage("all of them", _harm_all, r"has no whole checkpoint, only damaged ones", None),
]


def is_told(damage: Damage, text: str) -> bool:
    """Whether a run has reported a damage as expected, and nothing else."""
    return bool(re.search(damage.told, text)) if damage.told else not text
