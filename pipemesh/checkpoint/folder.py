"""Folders of checkpoints: the newest, the best and damaged ones, and locks on folders and files."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from pipemesh.checkpoint.files import check_path, write_whole
from pipemesh.checkpoint.manifest import BASE, INDEX, SUFFIX, WEIGHTS_ONLY, Manifest
from pipemesh.errors import CheckpointError, DamagedError, SaveError

_INDEX = re.compile(r"ckpt-(\d+)\.index", re.ASCII)
# Only these are removed: another program may keep `ckpt-100.pt` in the same folder.
_PART = re.compile(r"ckpt-(\d+)\.(?:manifest|data-\d{5}-of-\d{5})", re.ASCII)
_UNFINISHED = re.compile(r"ckpt-(\d+)_temp", re.ASCII)
# The temporary name of the list of checkpoints.
_LIST = re.compile(r"\.checkpoint\.\d+", re.ASCII)
DAMAGED = "damaged-"
# The name of the list.
LIST = "checkpoint"
_DAMAGED = re.compile(rf"{DAMAGED}ckpt-\d+", re.ASCII)
# What is left of a checkpoint, in place or set aside.
_LEFT = re.compile(rf"((?:{DAMAGED})?ckpt-(\d+))\.(?:index|manifest)", re.ASCII)
_MANIFEST = re.compile(rf"(?:{DAMAGED})?ckpt-(\d+){re.escape(SUFFIX)}", re.ASCII)


def steps_of(folder: str) -> list[int]:
    """Returns the steps of a folder's checkpoints in ascending order, damaged ones included."""
    return sorted(int(match[1]) for name in _names(folder) if (match := _INDEX.fullmatch(name)))


def path_of(folder: str, step: int) -> str:
    """Returns the path of the checkpoint of a step, without any file ending."""
    return os.path.join(folder, f"ckpt-{step}")


def newest(folder: str) -> str | None:
    """Returns the path of the newest checkpoint of a folder, lingvo's `ckpt-00000010` included.

    Args:
        folder: the folder; it need not exist.

    Returns:
        The path without any file ending, or None without a checkpoint.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("ckpt-9.index", "ckpt-10.index", "ckpt-11.manifest"):
        ...     pathlib.Path(folder, name).touch()
        >>> os.path.basename(newest(folder))
        'ckpt-10'
    """
    steps = [(int(match[1]), name) for name in _names(folder) if (match := _INDEX.fullmatch(name))]
    return os.path.join(folder, max(steps)[1].removesuffix(".index")) if steps else None


def newest_whole(folder: str) -> tuple[str, Manifest] | None:
    """Returns the newest whole checkpoint of a folder and its manifest.

    Newer checkpoints that their manifests show as damaged are set aside, with a message on standard
    error.

    Args:
        folder: the folder; it need not exist.

    Returns:
        The path without any file ending and the manifest, or None without a checkpoint.

    Raises:
        CheckpointError: the newest checkpoint is another program's or cannot be read now, or all
            checkpoints were damaged.

    Example:
        >>> import tempfile
        >>> newest_whole(tempfile.mkdtemp())
    """
    while path := newest(folder):
        try:
            if not os.path.lexists(path + SUFFIX) and any(map(_MANIFEST.fullmatch, _names(folder))):
                # This library wrote the others, so it wrote this one, too.
                raise DamagedError(path, f"{path}{SUFFIX} is missing")
            manifest = Manifest.read(path)
            manifest.check(path)
            return path, manifest
        except DamagedError as error:
            go_back(error)
    names = {name.partition(".")[0] for name in _names(folder)}
    if damaged := sorted(filter(_DAMAGED.fullmatch, names)):
        raise CheckpointError(
            f"{folder} has no whole checkpoint, only damaged ones ({', '.join(damaged)}); "
            f"put a copy of one there, remove {DAMAGED}* to begin anew, or give another folder"
        )
    return None


def lost_run(path: str, has_changed: bool) -> str | None:
    """Returns the newest lost checkpoint of a run that began with the newest readable one, `path`;
    None without one. Only its note has the flags of that run.

    Raises:
        CheckpointError: the run began with imported weights, or `has_changed` what is trained, and
            that note cannot be read.
    """
    folder, name = os.path.split(path)
    first = Manifest.read(path)
    left = {(int(m[2]), m[1]) for file in _names(folder) if (m := _LEFT.fullmatch(file))}
    for _, newer in sorted(pair for pair in left if pair[0] > first.step)[::-1]:
        lost = os.path.join(folder, newer)
        try:
            base = Manifest.read(lost).note.get(BASE, {})
        except CheckpointError as error:
            if WEIGHTS_ONLY not in first.note and not has_changed:
                continue
            raise CheckpointError(
                f"{lost} had the flags of the run, which cannot be read ({error}); move it away to "
                f"begin anew with {name}, and give the flags again, or --config with config.toml "
                "beside it"
            ) from error
        if WEIGHTS_ONLY in first.note or base.get("name") == name:
            return lost
    return None


def go_back(error: DamagedError) -> None:
    """Sets a damaged checkpoint aside, with a message on standard error.

    Raises:
        CheckpointError: adapters need it, so there is nothing to go back to.
    """
    folder, name = os.path.split(error.path)
    if name in _bases(folder):
        raise CheckpointError(f"{error}; adapters need it, so put a copy of it there") from error
    aside = os.path.basename(set_aside(error.path))
    previous = newest(folder)
    print(f"{error}; set aside as {aside}, going back to {previous or 'none'}", file=sys.stderr)


def set_aside(path: str) -> str:
    """Renames the files of a damaged checkpoint, so that the one before it is the newest; returns
    its new path.
    """
    folder, name = os.path.split(path)
    aside = os.path.join(folder, DAMAGED + name)
    # Data, index, manifest: after a kill in between, the rest is still found damaged, not removed.
    for file in sorted(_files(folder, name)):
        to = aside + file.removeprefix(name)
        # A folder that was set aside earlier cannot be replaced.
        _take_away(to)
        os.replace(os.path.join(folder, file), to)
    return aside


def publish(temporary: str, path: str) -> list[str]:
    """Renames the files of a written checkpoint, all or none, and returns their new paths."""
    folder, name = os.path.split(temporary)
    # The index last: without it the rest is no checkpoint.
    files = sorted(_files(folder, name), key=lambda file: file.endswith(INDEX))
    paths: list[str] = []
    try:
        for file in files:
            new = path + file.removeprefix(name)
            os.replace(os.path.join(folder, file), new)
            paths.append(new)
    except OSError:
        # Otherwise they would look like a checkpoint that lost its index.
        for new in paths:
            with contextlib.suppress(OSError):
                os.unlink(new)
        raise
    return paths


def remove(path: str) -> None:
    """Removes a checkpoint."""
    folder, name = os.path.split(path)
    # The index first, so that no partial checkpoint exists.
    for file in sorted(_files(folder, name), key=lambda file: not file.endswith(INDEX)):
        _take_away(os.path.join(folder, file))


def remove_leftovers(folder: str) -> None:
    """Removes parts of checkpoints that were never completed, or whose rest was removed."""
    # The newest one, if it was completed and only lacks its index, is set aside with a message.
    names, complete = _names(folder), steps_of(folder)
    unfinished = {int(match[1]) for name in names if (match := _UNFINISHED.fullmatch(name))}
    parts = {name: int(match[1]) for name in names if (match := _PART.fullmatch(name))}
    # A checkpoint being written has a temporary folder, and removed ones are older than the newest.
    newer = {step for step in parts.values() if step > max(complete, default=-1)}
    for step in sorted(newer - unfinished):
        path = path_of(folder, step)
        go_back(DamagedError(path, f"{path}{INDEX} is missing"))
    bases = _bases(folder)
    for name, step in parts.items():
        if step not in complete and f"ckpt-{step}" not in bases:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    for name in names:
        path = os.path.join(folder, name)
        if _LIST.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(path)
        elif _UNFINISHED.fullmatch(name):
            # Last: it marks the parts as incomplete.
            shutil.rmtree(path, ignore_errors=True)


def list_for_tensorflow(folder: str, names: Sequence[str]) -> None:
    """Writes the list that `tf.train.latest_checkpoint` reads, the newest last."""
    lines = [f'model_checkpoint_path: "{names[-1] if names else ""}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names or [""]]
    with contextlib.suppress(OSError):
        write_whole(os.path.join(folder, LIST), "\n".join([*lines, ""]).encode())


def to_let_go(folder: str, keep: int, keep_best: int) -> Iterable[str]:
    """Returns the checkpoints that are neither among the newest nor among the best, nor a base."""
    steps = steps_of(folder)
    bases = _bases(folder) if steps[:-keep] else ()
    older = [step for step in steps[:-keep] if f"ckpt-{step}" not in bases]
    best: set[int] = set()
    if keep_best:
        scores = {step: score for step in steps if (score := _score(folder, step)) is not None}
        best = set(sorted(scores, key=lambda step: (scores[step], step))[:keep_best])
    return [path_of(folder, step) for step in older if step not in best]


def _bases(folder: str) -> set[str]:
    """Returns the names of the checkpoints that others note as their `BASE`, which none removes."""
    bases: set[str] = set()
    for file in filter(_MANIFEST.fullmatch, _names(folder)):
        with contextlib.suppress(CheckpointError):
            base = Manifest.read(os.path.join(folder, file.removesuffix(SUFFIX))).note.get(BASE)
            if isinstance(base, dict):
                bases.add(base["name"])
    return bases


def _score(folder: str, step: int) -> float | None:
    with contextlib.suppress(CheckpointError, OSError):
        score = Manifest.read(path_of(folder, step)).score
        return score if score is not None and math.isfinite(score) else None
    return None


def _take_away(path: str) -> None:
    """Removes a file, or a folder in its place, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _files(folder: str, name: str) -> list[str]:
    ends = re.compile(rf"{re.escape(name)}\.(?:index|manifest|data-\d{{5}}-of-\d{{5}})", re.ASCII)
    return [file for file in _names(folder) if ends.fullmatch(file)]


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


# Open index files of checkpoints that this process reads.
_read: list[int] = []


class Folder:
    """A lock on a folder, as a context manager: the folder is created, writable and held by this
    run alone.

    Entering removes unfinished files of a killed run. The kernel releases the lock when the process
    ends for any reason. If an error leaves a folder empty that was created, it is removed.

    Args:
        path: the folder.

    Raises:
        CheckpointError: the path is not a folder, is not writable, is not UTF-8, or another run
            holds it.

    Example:
        >>> import tempfile
        >>> with Folder(os.path.join(tempfile.mkdtemp(), "run")) as folder:
        ...     os.path.basename(folder.path)
        'run'
    """

    def __init__(self, path: str) -> None:
        self.path = path
        check_path(path)
        if os.path.lexists(path) and not os.path.isdir(path):
            kind = "a file" if os.path.exists(path) else "a link to nothing"
            raise CheckpointError(f"--logdir={path!r} is {kind}; give a folder")
        # Folders that this makes, the innermost first.
        self._made: list[str] = []
        above = os.path.abspath(path)
        while not os.path.lexists(above):
            self._made.append(above)
            above = os.path.dirname(above)
        try:
            os.makedirs(path, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
            # Lock the folder itself, to leave no lock file behind.
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(
                f"--logdir={path!r} cannot be written to ({error.strerror}); give another"
            ) from error

    def __enter__(self) -> Folder:
        error = _lock(self._fd)
        if isinstance(error, BlockingIOError):
            os.close(self._fd)
            raise CheckpointError(
                f"--logdir={self.path!r} is in use: another run writes to it; wait for it, "
                "stop it, or give another folder"
            )
        if error is not None:
            # Some network file systems have no locks.
            print(
                f"--logdir={self.path!r} cannot be locked ({error.strerror}); make sure that no "
                "other run writes to it",
                file=sys.stderr,
            )
        _held.append(self)
        try:
            remove_leftovers(self.path)
        except CheckpointError:
            self.__exit__()
            raise
        return self

    def check(self) -> None:
        """Checks that the path still leads to the locked folder.

        A new folder in its place is locked, if no other run holds it.

        Raises:
            OSError: the folder was removed.
            SaveError: another run holds the folder in its place.
        """
        if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            return
        fd = os.open(self.path, os.O_RDONLY)
        if isinstance(_lock(fd), BlockingIOError):
            os.close(fd)
            raise SaveError(
                "the folder was removed, and another run writes to a new one of its name"
            )
        os.close(self._fd)
        self._fd = fd

    def __exit__(self, kind: object = None, *_: object) -> None:
        _held.remove(self)
        if kind is not None:
            # Only if nothing has been written there.
            with contextlib.suppress(OSError):
                for path in self._made:
                    os.rmdir(path)
        os.close(self._fd)


def _lock(fd: int) -> OSError | None:
    """Locks a file without waiting; returns the error if others hold it or locks are missing."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


# The folders that this process holds.
_held: list[Folder] = []


def check_held(path: str) -> None:
    """Checks a folder as `Folder.check` does, if this process holds it."""
    for folder in _held:
        if folder.path == path:
            folder.check()


def hold_newest(folder: str) -> str | None:
    """Holds the newest checkpoint of a folder and returns its path, as `newest`."""
    # A run in the same folder removes it only after this process has ended.
    previous = None
    # If a run removes the newest in between, there is a newer one.
    while (path := newest(folder)) and not hold(path) and path != previous:
        previous = path
    return path


def hold(path: str) -> bool:
    """Holds a checkpoint until this process ends; returns whether it exists."""
    try:
        fd = os.open(path + INDEX, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        # Reading it will raise the error.
        return True
    _read.append(fd)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH)
    return os.fstat(fd).st_nlink > 0


@contextlib.contextmanager
def held_by_none(path: str) -> Iterator[bool]:
    """Yields whether no process holds a checkpoint; other processes wait for the end."""
    try:
        fd = os.open(path + INDEX, os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        # A file on a file system without locks counts as held by none.
        yield not isinstance(_lock(fd), BlockingIOError)
    finally:
        os.close(fd)
