"""Saved training: weights, optimizer, step and position in the data, as one."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipemeshError

_IDENTITY_FILE = "model.json"
_INDEX = re.compile(r"ckpt-(\d+)\.index", re.ASCII)


class CheckpointError(PipemeshError, ValueError):
    """A log directory holds something else than what is to be trained, or a damaged checkpoint."""


def identity(config: Any) -> dict[str, Any]:
    """What a checkpoint's weights depend on: not the plan, nor the speed of learning."""
    names = ("VOCAB_SIZE", "MODEL_DIM", "HIDDEN_DIM", "NUM_LAYERS", "NUM_HEADS", "SEQUENCE_LENGTH")
    return {
        "model": type(config).__name__,
        **{name.lower(): getattr(config, name) for name in names},
        "batch_size": config.BATCH_SIZE,
        "seed": config.SEED,
        "data_dir": config.DATA_DIR,
        "train_pattern": config.TRAIN_PATTERN,
        "heldout_pattern": config.HELDOUT_PATTERN,
    }


class Checkpoints:
    """Writes and restores checkpoints in a log directory.

    A checkpoint is one unit: it appears under its final name only when it is complete, so a
    process that is killed at any instant leaves the last complete one in place. It is keyed by the
    names of the variables and says nothing of stages or devices.

    Args:
        logdir: the directory; made if it does not exist.
        config: the model's configuration.
        tracked: objects to save under their names.
        keep: how many checkpoints to keep.

    Raises:
        CheckpointError: the directory holds another model's checkpoints, or is no directory.
    """

    def __init__(self, logdir: str, config: Any, keep: int = 3, **tracked: Any) -> None:
        check_identity(logdir, config)
        self._logdir, self._config = logdir, config
        self._checkpoint = tf.train.Checkpoint(**tracked)
        self._manager = tf.train.CheckpointManager(self._checkpoint, logdir, max_to_keep=keep)

    @property
    def latest(self) -> str | None:
        """Path of the newest complete checkpoint."""
        return latest_checkpoint(self._logdir)

    def restore(self) -> bool:
        """Restores the newest checkpoint; returns whether there was one.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        if self.latest is None:
            return False
        try:
            self._checkpoint.restore(self.latest).assert_existing_objects_matched()
        except Exception as error:
            # Any: the reader of a damaged file raises what its damage makes it stumble over.
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{self.latest} cannot be restored ({reason}); remove {self.latest}.* to go back "
                "to the checkpoint before, or give another --logdir"
            ) from error
        return True

    def save(self, step: int) -> str:
        """Saves everything; returns the path."""
        # First: a checkpoint is never there without a note of whose it is.
        temporary = os.path.join(self._logdir, f".{_IDENTITY_FILE}.{os.getpid()}")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(identity(self._config), file, indent=1)
        os.replace(temporary, os.path.join(self._logdir, _IDENTITY_FILE))
        return self._manager.save(checkpoint_number=step)


def latest_checkpoint(logdir: str) -> str | None:
    """Path of the newest complete checkpoint of a directory; None if there is none.

    The index is written last. TensorFlow's own list of checkpoints is written after that, so a
    process killed in between leaves a complete checkpoint that is not listed; and the list still
    names those that someone removed.
    """
    names = os.listdir(logdir) if os.path.isdir(logdir) else []
    steps = [int(match[1]) for name in names if (match := _INDEX.fullmatch(name))]
    return os.path.join(logdir, f"ckpt-{max(steps)}") if steps else None


def check_identity(logdir: str, config: Any) -> None:
    """Checks that a log directory may be used: it holds no checkpoint, or one of this model.

    Raises:
        CheckpointError: something else was trained there, or it is no directory.
    """
    if os.path.exists(logdir) and not os.path.isdir(logdir):
        raise CheckpointError(f"--logdir={logdir!r} is a file; give a directory")
    if latest_checkpoint(logdir) is None:
        return
    mine = identity(config)
    try:
        with open(os.path.join(logdir, _IDENTITY_FILE), encoding="utf-8") as file:
            theirs = dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"--logdir={logdir!r} holds checkpoints of another program, or lost its "
            f"{_IDENTITY_FILE}; give another directory"
        ) from error
    differing = [key for key in mine if theirs.get(key) != mine[key]]
    if differing:
        told = ", ".join(f"{key} {theirs.get(key)} there, {mine[key]} now" for key in differing)
        raise CheckpointError(
            f"--logdir={logdir!r} holds a checkpoint of another model or other data ({told}); give "
            "another --logdir, or the settings it was trained with"
        )
