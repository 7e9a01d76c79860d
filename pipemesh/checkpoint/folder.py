"""The folder of a training: which checkpoints it has, whole and damaged, and what else.

A checkpoint `ckpt-6` is `ckpt-6.data-?????-of-?????`, `ckpt-6.manifest` and `ckpt-6.index`. The
index gets its name last, so a process that is killed at any instant leaves a checkpoint whole or
none.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.manifest import INDEX, SUFFIX, Manifest
from pipemesh.errors import CheckpointError, DamagedError

_INDEX = re.compile(r"ckpt-(\d+)\.index", re.ASCII)
# Nothing else goes: somebody else may keep `ckpt-100.pt` in the same folder.
_PART = re.compile(r"ckpt-(\d+)\.(?:manifest|data-\d{5}-of-\d{5})", re.ASCII)
_UNFINISHED = re.compile(r"ckpt-(\d+)_temp", re.ASCII)
# Under which the list of checkpoints is written before it is renamed.
_LIST = re.compile(r"\.checkpoint\.\d+", re.ASCII)
DAMAGED = "damaged-"
# The list itself.
LIST = "checkpoint"
_MANIFEST = re.compile(rf"(?:{DAMAGED})?ckpt-\d+{re.escape(SUFFIX)}", re.ASCII)


def steps_of(folder: str) -> list[int]:
    """The steps of the checkpoints that a folder has, rising; they may be damaged."""
    return sorted(int(match[1]) for name in _names(folder) if (match := _INDEX.fullmatch(name)))


def path_of(folder: str, step: int) -> str:
    """Path of the checkpoint of a step, without any ending."""
    return os.path.join(folder, f"ckpt-{step}")


def newest(folder: str) -> str | None:
    """Path of the newest checkpoint, of lingvo's `ckpt-00000010` too; None if there is none.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("ckpt-9.index", "ckpt-10.index", "ckpt-11.manifest"):
        ...     pathlib.Path(folder, name).touch()
        >>> os.path.basename(newest(folder))
        'ckpt-10'
    """
    found = [(int(match[1]), name) for name in _names(folder) if (match := _INDEX.fullmatch(name))]
    return os.path.join(folder, max(found)[1].removesuffix(".index")) if found else None


def newest_whole(folder: str) -> tuple[str, Manifest] | None:
    """The newest whole checkpoint and its manifest; None if there is none.

    Newer ones that are damaged, as far as their manifests know, are set aside, and it is said.

    Raises:
        CheckpointError: the newest is another program's, or cannot be read now, or all there were
            are damaged.
    """
    while path := newest(folder):
        try:
            if not os.path.lexists(path + SUFFIX) and any(map(_MANIFEST.fullmatch, _names(folder))):
                # The others are of this library, so this one was, too.
                raise DamagedError(path, f"{path}{SUFFIX} is missing")
            manifest = Manifest.read(path)
            manifest.check(path)
            return path, manifest
        except DamagedError as error:
            go_back(error)
    if damaged := damaged_in(folder):
        raise CheckpointError(
            f"{folder} has no whole checkpoint, only what is damaged ({', '.join(damaged)}); "
            f"put a copy of one there, remove {DAMAGED}* to begin anew, or give another folder"
        )
    return None


def go_back(error: DamagedError) -> None:
    """Sets a damaged checkpoint aside, and says so on standard error."""
    aside = os.path.basename(set_aside(error.path))
    before = newest(os.path.dirname(error.path))
    print(f"{error}; set aside as {aside}, going back to {before or 'none'}", file=sys.stderr)


def damaged_in(folder: str) -> list[str]:
    """Names of the checkpoints that were set aside."""
    names = {name.partition(".")[0] for name in _names(folder)}
    return sorted(name for name in names if re.fullmatch(rf"{DAMAGED}ckpt-\d+", name, re.ASCII))


def set_aside(path: str) -> str:
    """Renames the files of a damaged checkpoint, so that the one before it is the newest.

    Args:
        path: the checkpoint.

    Returns:
        Its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    folder, name = os.path.split(path)
    aside = os.path.join(folder, DAMAGED + name)
    # Data, index, manifest: of a kill on the way the rest is found damaged again, nothing removed.
    for found in sorted(_files(folder, name)):
        to = aside + found.removeprefix(name)
        # What was set aside before may be a folder, which nothing takes the place of.
        _take_away(to)
        os.replace(os.path.join(folder, found), to)
    return aside


def publish(temporary: str, path: str) -> list[str]:
    """Gives the files of a checkpoint that was written their names, in whatever folder.

    Args:
        temporary: what their names begin with.
        path: of the checkpoint that they are to be.

    Returns:
        The paths of its files.

    Raises:
        OSError: one cannot be renamed; nothing is left of the others.
    """
    folder, name = os.path.split(temporary)
    # The index last: without it the rest is no checkpoint.
    files = sorted(_files(folder, name), key=lambda found: found.endswith(INDEX))
    paths: list[str] = []
    try:
        for found in files:
            new = path + found.removeprefix(name)
            os.replace(os.path.join(folder, found), new)
            paths.append(new)
    except OSError:
        # Else they would be taken for a checkpoint that lost its index.
        for new in paths:
            with contextlib.suppress(OSError):
                os.unlink(new)
        raise
    return paths


def remove(path: str) -> None:
    """Removes a checkpoint."""
    folder, name = os.path.split(path)
    # The index first: a checkpoint is never there in part.
    for found in sorted(_files(folder, name), key=lambda found: not found.endswith(INDEX)):
        _take_away(os.path.join(folder, found))


def remove_leftovers(folder: str) -> None:
    """Removes the parts of checkpoints that were not completed, or whose rest was removed.

    The newest, if it was completed and only its index is missing, is set aside, and it is said.
    """
    names, complete = _names(folder), steps_of(folder)
    unfinished = {int(match[1]) for name in names if (match := _UNFINISHED.fullmatch(name))}
    parts = {name: int(match[1]) for name in names if (match := _PART.fullmatch(name))}
    # While one is written its folder is there, and what is let go of is older than the newest.
    newer = {step for step in parts.values() if step > max(complete, default=-1)}
    for step in sorted(newer - unfinished):
        path = path_of(folder, step)
        go_back(DamagedError(path, f"{path}{INDEX} is missing"))
    for name, step in parts.items():
        if step not in complete:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    for name in names:
        path = os.path.join(folder, name)
        if _LIST.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(path)
        elif _UNFINISHED.fullmatch(name):
            # Only now: it says that the parts were not completed.
            shutil.rmtree(path, ignore_errors=True)


def list_for_tensorflow(folder: str, names: Sequence[str]) -> None:
    """Writes the list that `tf.train.latest_checkpoint` reads; nothing here depends on it.

    Args:
        folder: where the checkpoints lie.
        names: of the checkpoints, the newest last.
    """
    lines = [f'model_checkpoint_path: "{names[-1] if names else ""}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names or [""]]
    with contextlib.suppress(OSError):
        write_whole(os.path.join(folder, LIST), "\n".join([*lines, ""]).encode())


def to_let_go(folder: str, keep: int, keep_best: int) -> Iterable[str]:
    """Paths of the checkpoints that are neither among the newest nor among the best.

    Args:
        folder: where they lie.
        keep: how many of the newest to keep, at least 1.
        keep_best: how many of those with the lowest scores to keep besides.
    """
    steps = steps_of(folder)
    older = steps[:-keep]
    best: set[int] = set()
    if keep_best:
        scores = {step: score for step in steps if (score := _score(folder, step)) is not None}
        best = set(sorted(scores, key=lambda step: (scores[step], step))[:keep_best])
    return [path_of(folder, step) for step in older if step not in best]


def _score(folder: str, step: int) -> float | None:
    with contextlib.suppress(CheckpointError, OSError):
        score = Manifest.read(path_of(folder, step)).score
        return score if score is not None and math.isfinite(score) else None
    return None


def _take_away(path: str) -> None:
    """Removes a file, or a folder that stands in its place, if there is one."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _files(folder: str, name: str) -> list[str]:
    ends = re.compile(rf"{re.escape(name)}\.(?:index|manifest|data-\d{{5}}-of-\d{{5}})", re.ASCII)
    return [found for found in _names(folder) if ends.fullmatch(found)]


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []
