"""The batches of a training, and the place in the data that a checkpoint has."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import tensorflow as tf

from pipemesh.backend.saved_state import iterator_state
from pipemesh.checkpoint.reader import reason, restore
from pipemesh.errors import CheckpointError, DataError

# What the place is called in checkpoints.
NAME = "data/batches"


class Batches:
    """Batches of a dataset without end.

    An iterator that failed fails for ever, and is saved as failed; so is one that has read ahead
    and failed. So once the data cannot be read, what is to be saved is an iterator from before
    that, and how many batches were read since.

    Args:
        dataset: without end; if not all that it does is a function of its iterator's state, it
            begins anew when training goes on.
        read_ahead: how many batches it reads before they are asked for.

    Attributes:
        iterator: what a checkpoint is to have under `NAME`.
        skip: how many batches were read since the place that `iterator` has.

    Example:
        >>> batches = Batches(tf.data.Dataset.range(1000))
        >>> [int(batches.next()) for _ in range(3)]
        [0, 1, 2]
    """

    def __init__(self, dataset: tf.data.Dataset, read_ahead: int = 0) -> None:
        self._dataset, self._read_ahead = dataset, read_ahead
        self.iterator: Any = iter(dataset)
        self.skip = 0
        # Checkpoints that know a place in the data (None knows its beginning), the newest last, and
        # how many batches were read since.
        self._places: dict[str | None, int] = {None: 0}

    @functools.cached_property
    def is_restorable(self) -> bool:
        """Whether a place in it can be saved: it has no state outside of the iterator."""
        try:
            iterator_state(self.iterator)
        except tf.errors.OpError:
            return False
        return True

    def go_to(self, checkpoint: str, skip: int = 0) -> None:
        """Goes on where a checkpoint was.

        Args:
            checkpoint: its path.
            skip: how many batches later.

        Raises:
            CheckpointError: it has no place in this dataset.
            DataError: the data cannot be read.
        """
        restore(checkpoint, {NAME: self.iterator})
        self._places = {checkpoint: 0}
        for _ in range(skip):
            self.next()

    def saved(self, checkpoint: str) -> None:
        """Notes that the place of now is, or will be, in a checkpoint."""
        self._places = {
            known: read for known, read in self._places.items() if known is None or _exists(known)
        }
        self._places[checkpoint] = self.skip

    def next(self) -> Any:
        """The next batch.

        Raises:
            DataError: there is none, for the data cannot be read any more; `iterator` and `skip`
                say from where to go on.
        """
        try:
            batch = next(self.iterator)
        except (tf.errors.OpError, StopIteration) as error:
            self._go_back()
            told = "it has ended" if isinstance(error, StopIteration) else reason(error)
            raise DataError(f"the data to train on cannot be read any more ({told})") from error
        for path in self._places:
            self._places[path] += 1
        return batch

    def _go_back(self) -> None:
        """Takes an iterator of a place from which nothing was read ahead that failed."""
        places = [(path, read) for path, read in self._places.items() if not path or _exists(path)]
        certain = [place for place in places if place[1] >= self._read_ahead]
        # The newest of which it is certain, or else the oldest.
        for path, read in [*certain[::-1], *places[:1]]:
            iterator = iter(self._dataset)
            # It may be gone, or damaged, by now.
            with contextlib.suppress(CheckpointError):
                if path:
                    restore(path, {NAME: iterator})
                self.iterator, self.skip = iterator, read
                return


def _exists(checkpoint: str) -> bool:
    return os.path.exists(f"{checkpoint}.index")
