"""Checkpoints of a training: written beside it, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from pipemesh.checkpoint import folder as folders
from pipemesh.checkpoint.entries import Snapshot, entries_of
from pipemesh.checkpoint.lock import check_held, held_by_none
from pipemesh.checkpoint.manifest import Manifest
from pipemesh.checkpoint.reader import reason, restore
from pipemesh.checkpoint.shared_folder import JoinedFiles, writers
from pipemesh.errors import SaveError


class Checkpoints:
    """Saves and restores what is tracked, in a folder, in TensorFlow's own format.

    A checkpoint is keyed by logical names and says nothing of stages, slices or devices. Values are
    those of the instant at which `begin` or `save` was called, while training goes on: a thread
    writes them into files of other names. It is complete, and renamed, only after `confirm`, so
    that weights of which the next step shows that they are no good replace nothing. A process that
    is killed at any instant leaves the last complete one in place.

    What lies on workers they write themselves, if they see the folder; what they write is joined.

    Args:
        folder: it exists; see `Folder`.
        tracked: by name a `tf.Variable`, a `SlicedVariable`, or an iterator over a dataset.
        keep: how many of the newest to keep.
        keep_best: how many of those with the lowest scores to keep besides.

    Raises:
        CheckpointError: something else is tracked.

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
        >>> checkpoints.restore(path)
        []
        >>> w.numpy().tolist()
        [1.0, 2.0]
    """

    def __init__(
        self, folder: str, tracked: Mapping[str, Any], keep: int = 3, keep_best: int = 0
    ) -> None:
        self.folder, self._tracked = folder, dict(tracked)
        self._keep, self._keep_best = keep, keep_best
        self._entries = entries_of(tracked)
        self._files = JoinedFiles()
        # Of the hosts that were asked, whether they can write.
        self._writers: dict[str, bool] = {}
        self._writing: _Writing | None = None
        self._known: str | None = None

    @property
    def newest(self) -> str | None:
        """Path of the newest complete checkpoint; the last known while the folder is unreadable."""
        with contextlib.suppress(OSError):
            self._known = folders.newest(self.folder)
        return self._known

    def track(self, **tracked: Any) -> None:
        """Saves these too from now on, or instead of those of the same names."""
        self._tracked |= tracked
        self._entries = entries_of(self._tracked)

    def restore(self, path: str, *names: str) -> list[str]:
        """Restores what is tracked, or what is tracked under some names.

        Returns:
            The names of what the checkpoint has besides.

        Raises:
            CheckpointError: see `pipemesh.checkpoint.restore`.
        """
        return restore(path, {name: self._tracked[name] for name in names or self._tracked})

    def begin(self, step: int, note: Mapping[str, Any], score: float | None = None) -> str:
        """Takes the values of now, and begins to write them.

        The one before is waited for, if it is still being written.

        Args:
            step: the number of finished steps.
            note: what to know when it is read; JSON.
            score: what the model was judged by, less is better; None if it was not.

        Returns:
            The path that it will have when it is confirmed.

        Raises:
            SaveError: the one before could not be written; this one was not begun.
        """
        self.wait()
        snapshot = Snapshot.of(self._entries, self._hosts_that_write())
        path = folders.path_of(self.folder, step)
        self._writing = _Writing(self, path, snapshot, step, note, score)
        return path

    def confirm(self) -> None:
        """Lets what is being written be a checkpoint."""
        if self._writing:
            self._writing.decide(good=True)

    def abandon(self) -> None:
        """Lets what is being written be none, unless it was confirmed."""
        if self._writing:
            self._writing.decide(good=False)

    @property
    def is_undecided(self) -> bool:
        """Whether something waits for `confirm` or `abandon`."""
        return self._writing is not None and self._writing.is_undecided

    @property
    def is_writing(self) -> bool:
        """Whether something is being written, or waits for a decision."""
        return self._writing is not None and not self._writing.is_done

    def poll(self) -> None:
        """Tells whether what was written in the meantime could be.

        Raises:
            SaveError: it could not; nothing is left of it, and older ones stay.
        """
        if self._writing and self._writing.is_done:
            self.wait()

    def wait(self) -> str | None:
        """Waits until nothing is being written; what is undecided is abandoned.

        Returns:
            Path of the newest complete checkpoint; None if there is none.

        Raises:
            SaveError: as `poll`.
        """
        writing, self._writing = self._writing, None
        if writing:
            writing.decide(good=False)
            writing.join()
        return self.newest

    def save(self, step: int, note: Mapping[str, Any], score: float | None = None) -> str:
        """Saves everything, and waits for it.

        Args:
            step: see `begin`.
            note: see `begin`.
            score: see `begin`.

        Returns:
            Path of the checkpoint.

        Raises:
            SaveError: as `poll`.
        """
        path = self.begin(step, note, score)
        self.confirm()
        self.wait()
        return path

    def _hosts_that_write(self) -> list[str]:
        """The workers that write what lies on them; each is asked once."""
        hosts = {part.host for entry in self._entries for part in entry.parts}
        if new := sorted(hosts - self._writers.keys()):
            found: list[str] = []
            with contextlib.suppress(OSError):
                # Whoever writes the checkpoint will be told.
                found = writers(self.folder, new)
            self._writers |= {host: host in found for host in new}
        return [host for host in hosts if self._writers[host]]

    def _finish(self, temporary: str, path: str) -> None:
        """Renames what was written, and lets go of what is not to be kept any more."""
        # One of the same step, if there is one, must not be there in part.
        folders.remove(path)
        files = folders.publish(temporary, path)
        self._known = path
        gone = list(folders.to_let_go(self.folder, self._keep, self._keep_best))
        if gone:
            # A machine that loses power now must find what replaces them.
            for file in files:
                _write_through(file)
            _write_through(self.folder)
        for old in gone:
            # One that is being read goes later.
            with held_by_none(old) as is_free:
                if is_free:
                    folders.remove(old)
        steps = folders.steps_of(self.folder)
        folders.list_for_tensorflow(self.folder, [f"ckpt-{step}" for step in steps])


class _Writing:
    """A thread that writes a checkpoint."""

    def __init__(
        self,
        owner: Checkpoints,
        path: str,
        snapshot: Snapshot,
        step: int,
        note: Mapping[str, Any],
        score: float | None,
    ) -> None:
        self._owner, self._path = owner, path
        self._error: BaseException | None = None
        self._decided, self._good = threading.Event(), False
        # A kill may end it at any instant; the end of the program must not wait for a decision.
        self._thread = threading.Thread(
            # A list that is emptied: a thread keeps its arguments until it ends.
            target=self._run,
            args=([snapshot], step, note, score),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_undecided(self) -> bool:
        return not self._decided.is_set()

    def decide(self, good: bool) -> None:
        if not self._decided.is_set():
            self._good = good
            self._decided.set()

    def join(self) -> None:
        self._thread.join()
        error = self._error
        if error is None:
            return
        if isinstance(error, (OSError, tf.errors.OpError, SaveError)):
            raise SaveError(f"{self._path} cannot be written ({reason(error)})") from error
        raise error

    def _run(
        self,
        held: list[Snapshot],
        step: int,
        note: Mapping[str, Any],
        score: float | None,
    ) -> None:
        folder = f"{self._path}_temp"
        temporary = os.path.join(folder, os.path.basename(self._path))
        try:
            check_held(self._owner.folder)
            # Not the folder above it: who took that away is to be told.
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            self._owner._files.write(held.pop(), temporary)
            Manifest.of(temporary, step=step, note=note, score=score).write(temporary)
            self._decided.wait()
            if self._good:
                self._owner._finish(temporary, self._path)
        except BaseException as error:
            # Any: the thread that asks for it has to learn of it.
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
