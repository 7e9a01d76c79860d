"""Saved training: weights, optimizer, step and position in the text, as one."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf

from models.one_billion_word.about import About, CheckpointError
from models.one_billion_word.logdir import latest_checkpoint, remove_leftovers
from pipemesh.errors import PipemeshError


class SaveError(PipemeshError, OSError):
    """A checkpoint cannot be written: the disk is full, or the directory cannot be written to."""


class Checkpoints:
    """Writes and restores checkpoints in a log directory.

    A checkpoint is one unit: it appears under its final name only when it is complete, so a
    process that is killed at any instant leaves the last complete one in place. It is keyed by the
    names of the variables and says nothing of stages or devices.

    Args:
        logdir: the directory; it exists.
        keep: how many checkpoints to keep.
        **tracked: objects to save under their names.
    """

    def __init__(self, logdir: str, keep: int = 3, **tracked: Any) -> None:
        self._logdir, self._tracked = logdir, tracked
        self._checkpoint = tf.train.Checkpoint(**tracked)
        self._manager = tf.train.CheckpointManager(self._checkpoint, logdir, max_to_keep=keep)

    @property
    def latest(self) -> str | None:
        """Path of the newest complete checkpoint."""
        return latest_checkpoint(self._logdir)

    def track(self, **tracked: Any) -> None:
        """Saves these objects too from now on, or instead of those of the same names."""
        self._tracked |= tracked
        for name, value in tracked.items():
            setattr(self._checkpoint, name, value)

    def restore(self, path: str, *names: str) -> None:
        """Restores what is tracked under these names.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        # Not by the one that saves: TensorFlow restores what that one will track later, too.
        part = tf.train.Checkpoint(**{name: self._tracked[name] for name in names})
        try:
            part.read(path).assert_existing_objects_matched().expect_partial()
        except Exception as error:
            # Any: the reader of a damaged file raises what its damage makes it stumble over.
            raise CheckpointError(
                f"{path} cannot be restored ({reason(error)}); remove {path}.* to go back "
                "to the checkpoint before, or give another --logdir"
            ) from error

    def save(self, step: int, about: About) -> str:
        """Saves everything; returns the path.

        Raises:
            SaveError: it cannot be written; nothing is left of it, and older ones stay.
        """
        path = os.path.join(self._logdir, f"ckpt-{step}")
        try:
            # First: a checkpoint is never there without a note of whose it is.
            about.write(path)
            self._manager.save(checkpoint_number=step)
        except (OSError, tf.errors.OpError) as error:
            with contextlib.suppress(OSError):
                remove_leftovers(self._logdir)
            raise SaveError(f"{path} cannot be written ({reason(error)})") from error
        # Of the checkpoints that the manager has just let go.
        remove_leftovers(self._logdir)
        return path


def reason(error: Exception) -> str:
    """What happened, in one line, without what TensorFlow was doing."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        text = error.message  # pyright: ignore[reportAttributeAccessIssue]
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return first.split("}} ")[-1].split(" [Op:")[0]
