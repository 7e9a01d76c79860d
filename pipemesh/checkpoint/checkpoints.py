"""Saving: checkpoints written while training continues, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from pipemesh.checkpoint import folder as folders
from pipemesh.checkpoint.folder import check_held, held_by_none
from pipemesh.checkpoint.manifest import Manifest
from pipemesh.checkpoint.reader import reason
from pipemesh.checkpoint.slices import JoinedFiles, Snapshot, entries_of, writers
from pipemesh.errors import SaveError


class Checkpoints:
    """Saves tracked values in a folder, in TensorFlow's own format; `restore` reads them.

    A checkpoint is keyed by logical names and contains no stages, slices or devices. `begin` and
    `save` take the current values; a thread writes them into temporary files while training
    continues. Only `confirm` completes and renames the checkpoint, so weights that the next step
    shows to be bad replace nothing. A process that is killed at any instant leaves the last
    complete checkpoint.

    Workers that see the folder write their own values, and their files are joined.

    Args:
        folder: an existing folder; see `Folder`.
        tracked: by name a `tf.Variable`, a `SlicedVariable`, or an iterator over a dataset.
        keep: the number of newest checkpoints to keep.
        keep_best: the number of checkpoints with the lowest scores to keep in addition.

    Raises:
        CheckpointError: a tracked value is of another type.

    Example:
        >>> import tempfile
        >>> folder, w = tempfile.mkdtemp(), tf.Variable([1.0, 2.0])
        >>> checkpoints = Checkpoints(folder, {"w": w})
        >>> path = checkpoints.begin(7, note={"by": "me"})
        >>> _ = w.assign([0.0, 0.0])
        >>> checkpoints.confirm()
        >>> path = checkpoints.wait()
        >>> tf.train.load_checkpoint(path).get_tensor("w").tolist()
        [1.0, 2.0]
    """

    def __init__(
        self, folder: str, tracked: Mapping[str, Any], keep: int = 3, keep_best: int = 0
    ) -> None:
        self.folder, self._tracked = folder, dict(tracked)
        self._keep, self._keep_best = keep, keep_best
        self._entries = entries_of(tracked)
        self._files = JoinedFiles()
        # Whether each host that was asked can write.
        self._writers: dict[str, bool] = {}
        self._writing: _Writing | None = None
        self._known: str | None = None

    @property
    def newest(self) -> str | None:
        """The newest complete checkpoint; the last known one if the folder is unreadable."""
        with contextlib.suppress(OSError):
            self._known = folders.newest(self.folder)
        return self._known

    def track(self, **tracked: Any) -> None:
        """Saves these values, too, from now on, or instead of those of the same names.

        Args:
            **tracked: values by name, as in the constructor.
        """
        self._tracked |= tracked
        self._entries = entries_of(self._tracked)

    def begin(self, step: int, note: Mapping[str, Any], score: float | None = None) -> str:
        """Takes the current values, and begins to write them.

        Waits for the previous checkpoint, if it is still being written.

        Args:
            step: the number of finished steps.
            note: free-form JSON from the caller.
            score: the result of an evaluation, lower is better; None without one.

        Returns:
            The path of the checkpoint after it is confirmed.

        Raises:
            SaveError: the previous checkpoint could not be written; this one was not begun.
        """
        self.wait()
        snapshot = Snapshot.of(self._entries, self._hosts_that_write())
        path = folders.path_of(self.folder, step)
        writing = _Writing(self, path, [snapshot], step, note, score)
        writing.start()
        self._writing = writing
        return path

    def confirm(self) -> None:
        """Completes the checkpoint that is being written."""
        if self._writing:
            self._writing.decide(good=True)

    def abandon(self) -> None:
        """Discards the checkpoint that is being written, unless it was confirmed."""
        if self._writing:
            self._writing.decide(good=False)

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written, or waits for a decision."""
        return self._writing is not None and self._writing.is_alive()

    def poll(self) -> None:
        """Raises the error of a checkpoint that has failed in the meantime.

        Raises:
            SaveError: it could not be written; nothing is left of it, and older ones stay.
        """
        if self._writing and not self._writing.is_alive():
            self.wait()

    def wait(self) -> str | None:
        """Waits until nothing is being written; an undecided checkpoint is abandoned.

        Returns:
            The path of the newest complete checkpoint, None without one.

        Raises:
            SaveError: see `poll`.
        """
        writing, self._writing = self._writing, None
        if writing:
            writing.decide(good=False)
            writing.join()
            writing.check()
        return self.newest

    def save(self, step: int, note: Mapping[str, Any], score: float | None = None) -> str:
        """Saves everything, and waits until it is written.

        Takes the arguments of `begin`, returns its path, and raises the errors of `poll`.
        """
        path = self.begin(step, note, score)
        self.confirm()
        self.wait()
        return path

    def _hosts_that_write(self) -> list[str]:
        """Returns the workers that write their own values; each is asked once."""
        hosts = {part.host for entry in self._entries for part in entry.parts}
        if new := sorted(hosts - self._writers.keys()):
            able: list[str] = []
            with contextlib.suppress(OSError):
                # Writing the checkpoint will raise the error.
                able = writers(self.folder, new)
            self._writers |= {host: host in able for host in new}
        return [host for host in hosts if self._writers[host]]

    def _finish(self, temporary: str, path: str) -> None:
        """Renames the written files, and removes checkpoints that are not to be kept."""
        # An earlier checkpoint of the same step must not remain in part.
        folders.remove(path)
        files = folders.publish(temporary, path)
        self._known = path
        gone = list(folders.to_let_go(self.folder, self._keep, self._keep_best))
        if gone:
            # After a power failure the new one must exist before these are gone.
            for file in files:
                _write_through(file)
            _write_through(self.folder)
        for old in gone:
            # A checkpoint that is being read is removed later.
            with held_by_none(old) as is_free:
                if is_free:
                    folders.remove(old)
        steps = folders.steps_of(self.folder)
        folders.list_for_tensorflow(self.folder, [f"ckpt-{step}" for step in steps])


class _Writing(threading.Thread):
    """A thread that writes a checkpoint."""

    def __init__(
        self,
        owner: Checkpoints,
        path: str,
        held: list[Snapshot],
        step: int,
        note: Mapping[str, Any],
        score: float | None,
    ) -> None:
        # A daemon: the end of the program must not wait for a decision.
        super().__init__(name="checkpoint", daemon=True)
        self._owner, self._path = owner, path
        # A snapshot in a list, which is emptied: tensors are released once they are written.
        self._held = held
        self._step, self._note, self._score = step, note, score
        self._error: BaseException | None = None
        self._decided, self._good = threading.Event(), False

    def decide(self, good: bool) -> None:
        if not self._decided.is_set():
            self._good = good
            self._decided.set()

    def check(self) -> None:
        """Raises the error of a thread that has ended."""
        error = self._error
        if error is None:
            return
        if isinstance(error, (OSError, tf.errors.OpError, SaveError)):
            raise SaveError(f"{self._path} cannot be written ({reason(error)})") from error
        raise error

    def run(self) -> None:
        folder = f"{self._path}_temp"
        temporary = os.path.join(folder, os.path.basename(self._path))
        try:
            check_held(self._owner.folder)
            # Not the folder above it: if that was removed, it is an error.
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            self._owner._files.write(self._held.pop(), temporary)
            manifest = Manifest.of(temporary, self._step, self._note, self._score)
            manifest.write(temporary)
            self._decided.wait()
            if self._good:
                self._owner._finish(temporary, self._path)
        except BaseException as error:
            # Any error: the thread that joins raises it.
            self._error = error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _write_through(path: str) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
