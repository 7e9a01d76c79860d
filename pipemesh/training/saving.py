"""What a training saves: its variables, and its place in the data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tensorflow as tf

from pipemesh.checkpoint import Checkpoints, Manifest, newest_whole
from pipemesh.checkpoint.folder import go_back, path_of
from pipemesh.checkpoint.reader import read_tensors
from pipemesh.errors import CheckpointError, DamagedError, SaveError
from pipemesh.training.batches import NAME, Batches

# What of a note may differ between two checkpoints that the same command goes on from.
_OF_THE_PLACE = ("skip", "flags", "best", "judged")
# Noted of a checkpoint that has weights alone, which other programs have trained.
WEIGHTS_ONLY = "weights_only"


class Saving:
    """The checkpoints of a training.

    Args:
        folder: where they lie; it exists.
        state: by name, the variables of model, optimizer and training, as `Checkpoints` takes them.
        keep: how many of the newest to keep.
        keep_best: how many of the best to keep besides.
        weights: which of the names a checkpoint that has weights alone has; of what else there is
            nothing is restored then.

    Example:
        >>> import os, tempfile
        >>> import tensorflow as tf
        >>> step = tf.Variable(0)
        >>> saving = Saving(tempfile.mkdtemp(), {"global_step": step})
        >>> saving.follow(Batches(tf.data.Dataset.range(9)))
        >>> os.path.basename(saving.save(0, note={}, check=lambda: None))
        'ckpt-0'
    """

    def __init__(
        self,
        folder: str,
        state: Mapping[str, Any],
        keep: int = 3,
        keep_best: int = 0,
        weights: Collection[str] = (),
    ) -> None:
        self._folder, self._names, self._weights = folder, list(state), list(weights)
        self._checkpoints = Checkpoints(folder, state, keep, keep_best)
        self._batches: Batches | None = None

    @property
    def newest(self) -> str | None:
        """Path of the newest complete checkpoint."""
        return self._checkpoints.newest

    def restore(self, path: str) -> str:
        """Gives variables what a checkpoint has for them; the place in the data is `Batches.go_to`.

        If it is damaged, it is set aside, and the one before serves, which is said.

        Args:
            path: of the checkpoint.

        Returns:
            Path of the checkpoint that served.

        Raises:
            CheckpointError: it has tensors that the model has not, or lacks some; it is damaged and
                none is left, or the one before was made with other settings.
        """
        try:
            only = Manifest.read(path).note.get(WEIGHTS_ONLY)
            beyond = self._checkpoints.restore(path, *(self._weights if only else self._names))
            if NAME in beyond:
                beyond.remove(NAME)
                read_tensors(path, [NAME], [""], [tf.variant])
        except DamagedError as error:
            damaged = Manifest.read(path).note
            go_back(error)
            before = newest_whole(self._folder)
            if before is None:
                raise
            if _settings(before[1].note) != _settings(damaged):
                # What was made by its note is not what the one before was made with.
                raise CheckpointError(
                    f"{error}; {before[0]} was made with other settings, so run the same command "
                    "again to go on from it"
                ) from error
            return self.restore(before[0])
        if beyond:
            raise CheckpointError(
                f"{path} has {len(beyond)} tensors that the model has not, such as {beyond[0]!r}; "
                "give another --logdir, or the settings it was trained with"
            )
        return path

    def follow(self, batches: Batches) -> None:
        """Saves the place of these batches, too; again if their iterator is another one."""
        # What is being written has the place of an iterator that has failed since.
        self._checkpoints.abandon()
        self._batches = batches
        if batches.is_restorable:
            self._checkpoints.track(**{NAME: batches.iterator})

    def begin(self, step: int, note: Mapping[str, Any], score: float | None = None) -> None:
        """Begins to save everything as it is now.

        It becomes a checkpoint when `confirm` says that the weights are good.

        Args:
            step: the number of finished steps.
            note: see `Checkpoints.begin`.
            score: what the weights were judged by, less is better; None if they were not.

        Raises:
            SaveError: the one before cannot be written; this one has begun.
        """
        try:
            self._checkpoints.wait()
        finally:
            path = self._checkpoints.begin(step, note, score)
            if self._batches:
                self._batches.saved(path)

    def save(self, step: int, note: Mapping[str, Any], check: Callable[[], None]) -> str:
        """Saves everything, unless the newest checkpoint is that of this step.

        Args:
            step: the number of finished steps.
            note: see `Checkpoints.begin`.
            check: raises an error if the weights are no good.

        Returns:
            Path of the checkpoint.

        Raises:
            SaveError: it cannot be written.
        """
        wanted = path_of(self._folder, step)
        if self.newest != wanted:
            check()
            self.confirm()
        with contextlib.suppress(SaveError):
            # Of an earlier one: this one is tried all the same.
            self._checkpoints.wait()
        if self.newest != wanted:
            self.begin(step, note)
            self.confirm()
            self._checkpoints.wait()
        return wanted

    def judge(self, path: str, score: float) -> None:
        """Notes what the weights of a checkpoint were judged by after it was saved.

        Args:
            path: of the checkpoint.
            score: less is better.
        """
        # It decides which ones are kept, and nothing else.
        with contextlib.suppress(OSError, CheckpointError):
            dataclasses.replace(Manifest.read(path), score=score).write(path)

    def confirm(self) -> None:
        """Says that the weights that were saved last are good."""
        self._checkpoints.confirm()

    def poll(self) -> None:
        """Tells whether what was begun could be written.

        Raises:
            SaveError: it could not.
        """
        self._checkpoints.poll()

    def give_up(self) -> None:
        """Lets what is not confirmed be no checkpoint, and waits for what is."""
        self._checkpoints.abandon()
        with contextlib.suppress(SaveError):
            self._checkpoints.wait()


def _settings(note: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in note.items() if name not in _OF_THE_PLACE}
