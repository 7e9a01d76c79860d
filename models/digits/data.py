"""The handwritten digits of scikit-learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from pipemesh.errors import needed

SIDE = 8
NUM_CLASSES = 10
_HELD_OUT = 360


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images [n, height, width] in [0, 1], float32, and labels [n], int32."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields batches without end; each epoch has its own order and includes every image."""
        waiting = np.zeros([0], np.int64)
        epoch = 0
        while True:
            while len(waiting) < size:
                order = np.random.default_rng([seed, epoch]).permutation(len(self))
                waiting = np.concatenate([waiting, order])
                epoch += 1
            chosen, waiting = waiting[:size], waiting[size:]
            yield self.images[chosen], self.labels[chosen]

    def in_order(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields images, labels and their number, all once; copies of the first images pad the last
        batch.
        """
        for begin in range(0, len(self), size):
            chosen = np.arange(begin, begin + size)
            yield (
                self.images[chosen % len(self)],
                self.labels[chosen % len(self)],
                min(size, len(self) - begin),
            )


def load_digits() -> tuple[Digits, Digits]:
    """Returns 1,437 digits of 8 x 8 for training, and 360 held-out ones by other writers."""
    datasets = needed("sklearn.datasets", "the dataset of digits", "examples", "scikit-learn")
    found = datasets.load_digits()
    images = found.images.astype(np.float32) / 16
    labels = found.target.astype(np.int32)
    cut = len(labels) - _HELD_OUT
    return Digits(images[:cut], labels[:cut]), Digits(images[cut:], labels[cut:])
