"""Checkpoints of a run: its variables and its position in the data."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tensorflow as tf

from pipemesh.checkpoint import Checkpoints, Manifest, newest_whole, restore
from pipemesh.checkpoint.folder import go_back, path_of
from pipemesh.checkpoint.manifest import BASE, SUFFIX, WEIGHTS_ONLY
from pipemesh.checkpoint.reader import contents, read_tensors
from pipemesh.errors import CheckpointError, DamagedError, SaveError
from pipemesh.layers.named.lora import ADAPTERS
from pipemesh.training.inputs import NAME, Batches

# Keys of a note that may differ between two checkpoints of one run.
_OF_THE_PLACE = ("skip", "flags", "best", "judged")


def base_of(path: str) -> str | None:
    """Returns the checkpoint that has the frozen weights of another one; None if that has them.

    Raises:
        CheckpointError: that checkpoint is missing, or is not the one that was trained on.
    """
    base = Manifest.read(path).note.get(BASE) if os.path.exists(path + SUFFIX) else None
    if base is None:
        return None
    at = os.path.join(os.path.dirname(path), base["name"])
    try:
        manifest = Manifest.read(at)
        manifest.check(at)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} has adapters alone, for the weights of {base['name']}: {error}; put a copy of "
            "that beside it"
        ) from error
    if manifest.index != base["index"]:
        raise CheckpointError(
            f"{path} has adapters alone, for other weights than those of {at}; put a copy of the "
            f"{base['name']} that they were trained on beside it"
        )
    return at


def restore_all(path: str, state: Mapping[str, Any]) -> list[str]:
    """Restores variables from a checkpoint and from the one that has its frozen weights, if any.

    Returns the names of the checkpoint's other values; raises as `pipemesh.checkpoint.restore` and
    `base_of`, and CheckpointError if the model has other adapters.
    """
    if (at := base_of(path)) is None:
        return restore(path, state)
    names = contents(path)[0].keys()
    frozen = contents(at)[0].keys() - names
    adapter = re.compile(rf"{ADAPTERS}.*/var$")
    odd = [name for name in names ^ (state.keys() - frozen) if adapter.search(name)]
    if odd:
        has, lacks = ("the model", path) if min(odd) in state else (path, "the model")
        raise CheckpointError(
            f"{has} has adapters that {lacks} has not, such as {min(odd)!r}; give the rank and the "
            "targets that they were trained with, or begin with merged weights: `pipemesh "
            "checkpoint export --merged`, then import"
        )
    restore(at, {name: value for name, value in state.items() if name in frozen})
    return restore(path, {name: value for name, value in state.items() if name not in frozen})


class Saving:
    """The checkpoints of a run.

    Args:
        folder: an existing folder for them.
        state: variables of model, optimizer and run by name, as `Checkpoints` takes them.
        keep: number of newest checkpoints to keep.
        keep_best: number of best checkpoints to keep in addition.
        weights: the names in a checkpoint with only weights; no other names are restored from it.
        base: the names of frozen weights that are not saved. They are those of the checkpoint that
            the run begins with, which is never removed.

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
        base: Collection[str] = (),
    ) -> None:
        self._folder, self._state, self._weights = folder, dict(state), list(weights)
        self._base, self._noted_base = set(base), dict[str, str]()
        saved = {name: value for name, value in state.items() if name not in self._base}
        self._checkpoints = Checkpoints(folder, saved, keep, keep_best)
        self._batches: Batches | None = None

    @property
    def newest(self) -> str | None:
        """Returns the path of the newest complete checkpoint."""
        return self._checkpoints.newest

    def restore(self, path: str) -> str:
        """Restores variables from a checkpoint; `Batches.go_to` restores the data position.

        A damaged checkpoint is set aside with a warning, and the one before it is restored. Returns
        the path of the restored one.

        Raises:
            CheckpointError: its tensors differ from the model's. Or it is damaged, and there is no
                other or the other had different settings.
        """
        try:
            manifest = Manifest.read(path)
            only = manifest.note.get(WEIGHTS_ONLY)
            names = self._weights if only else list(self._state)
            are_new = bool(self._base) and BASE not in manifest.note
            if are_new:
                names = [*self._base, "global_step"]
            if self._base:
                own = {"name": os.path.basename(path), "index": manifest.index}
                self._noted_base = own if are_new else manifest.note[BASE]
            beyond = restore_all(path, {name: self._state[name] for name in names})
            if are_new:
                # Those of the optimizer, and scalars, the scale of a loss in float16, belong to the
                # training of the weights, which are frozen now.
                shapes = contents(path)[0]
                beyond = [n for n in beyond if n == NAME or (n.endswith("/var") and shapes[n])]
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
                # The model was made from the note of the damaged checkpoint, which differs from
                # that of the one before.
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
        """Saves the position of these batches too; call it again if their iterator changes."""
        # The checkpoint being written has the position of an iterator that has failed since.
        self._checkpoints.abandon()
        self._batches = batches
        if batches.is_restorable:
            self._checkpoints.track(**{NAME: batches.iterator})

    def begin(self, step: int, note: Mapping[str, Any], score: float | None = None) -> None:
        """Begins to save the current state, which becomes a checkpoint when `confirm` reports that
        the weights are good; for the arguments see `Checkpoints.begin`.

        Raises:
            SaveError: the checkpoint before cannot be written; this one has begun.
        """
        try:
            self._checkpoints.wait()
        finally:
            note = {**note, **({BASE: self._noted_base} if self._base else {})}
            path = self._checkpoints.begin(step, note, score)
            if self._batches:
                self._batches.saved(path)

    def save(self, step: int, note: Mapping[str, Any], check: Callable[[], None]) -> str:
        """Saves the current state, unless the newest checkpoint has this step; returns the path.

        Args:
            step: the number of finished steps.
            note: see `Checkpoints.begin`.
            check: raises an error if the weights are bad.

        Raises:
            SaveError: the checkpoint cannot be written.
        """
        path = path_of(self._folder, step)
        if self.newest != path:
            check()
            self.confirm()
        with contextlib.suppress(SaveError):
            # The error belongs to an earlier checkpoint; try this one anyway.
            self._checkpoints.wait()
        if self.newest != path:
            self.begin(step, note)
            self.confirm()
            self._checkpoints.wait()
        return path

    def judge(self, path: str, score: float) -> None:
        """Notes the score of a saved checkpoint; lower is better."""
        # The score only decides which checkpoints are kept.
        with contextlib.suppress(OSError, CheckpointError):
            dataclasses.replace(Manifest.read(path), score=score).write(path)

    def confirm(self) -> None:
        """Confirms that the last saved weights are good."""
        self._checkpoints.confirm()

    def poll(self) -> None:
        """Raises SaveError if a checkpoint that was begun could not be written."""
        self._checkpoints.poll()

    def give_up(self) -> None:
        """Drops unconfirmed checkpoints, and waits for confirmed ones."""
        self._checkpoints.abandon()
        with contextlib.suppress(SaveError):
            self._checkpoints.wait()


def _settings(note: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in note.items() if name not in _OF_THE_PLACE}
