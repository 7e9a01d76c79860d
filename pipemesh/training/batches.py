"""The batches of a run, and the position in the data that a checkpoint stores."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import tensorflow as tf

from pipemesh.backend.saved_state import iterator_state
from pipemesh.checkpoint.reader import reason, restore
from pipemesh.errors import CheckpointError, DataError

# The name of the data position in checkpoints.
NAME = "data/batches"


class Batches:
    """Batches of an endless dataset.

    TensorFlow's iterator never recovers from an error, and is saved as failed. This also holds for
    an iterator that failed while reading ahead. So after an error `iterator` is replaced by an
    earlier copy, and `skip` counts the batches read since then.

    Args:
        dataset: an endless dataset. If its state is not all in the iterator, a resumed run reads it
            from the beginning.
        read_ahead: number of batches to prefetch.

    Attributes:
        iterator: the iterator that a checkpoint saves under `NAME`.
        skip: number of batches read since the position of `iterator`.

    Example:
        >>> batches = Batches(tf.data.Dataset.range(1000))
        >>> [int(batches.next()) for _ in range(3)]
        [0, 1, 2]
    """

    def __init__(self, dataset: tf.data.Dataset, read_ahead: int = 0) -> None:
        self._dataset, self._read_ahead = dataset, read_ahead
        self.iterator: Any = iter(dataset)
        self.skip = 0
        # Checkpoints that store a position in the data (None is the beginning), the newest last,
        # with the number of batches read since.
        self._places: dict[str | None, int] = {None: 0}

    @functools.cached_property
    def is_restorable(self) -> bool:
        """Returns whether the position can be saved: no state lies outside the iterator."""
        try:
            iterator_state(self.iterator)
        except tf.errors.OpError:
            return False
        return True

    def go_to(self, checkpoint: str, skip: int = 0) -> None:
        """Moves to the position in a checkpoint.

        Args:
            checkpoint: path of the checkpoint.
            skip: number of batches to skip after that position.

        Raises:
            CheckpointError: the checkpoint has no position in this dataset.
            DataError: the data cannot be read.
        """
        restore(checkpoint, {NAME: self.iterator})
        self._places = {checkpoint: 0}
        for _ in range(skip):
            self.next()

    def saved(self, checkpoint: str) -> None:
        """Notes that a checkpoint has, or will have, the current position."""
        self._places = {
            known: read for known, read in self._places.items() if known is None or _exists(known)
        }
        self._places[checkpoint] = self.skip

    def next(self) -> Any:
        """Returns the next batch.

        Raises:
            DataError: the data cannot be read; `iterator` and `skip` describe where to resume.
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
        """Replaces the iterator by one restored from a position before the failure."""
        places = [(path, read) for path, read in self._places.items() if not path or _exists(path)]
        certain = [place for place in places if place[1] >= self._read_ahead]
        # Take the newest position that certainly precedes the failure, or else the oldest.
        for path, read in [*certain[::-1], *places[:1]]:
            iterator = iter(self._dataset)
            # The checkpoint may have been deleted or damaged.
            with contextlib.suppress(CheckpointError):
                if path:
                    restore(path, {NAME: iterator})
                self.iterator, self.skip = iterator, read
                return


def _exists(checkpoint: str) -> bool:
    return os.path.exists(f"{checkpoint}.index")
