"""Volumes with spheres and tubes in noise, and the class of each voxel; made by formula."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

CLASSES = ("background", "sphere", "tube")
_NOISE = 0.5


def volume(
    seed: int, index: int, side: int, held_out: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns intensities [depth, rows, cols], float32, and classes, int32, of one volume.

    Both are functions of the arguments. Spheres and tubes are equally bright.
    """
    draw = np.random.default_rng([held_out, seed, index])
    places = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1)
    classes = np.zeros([side] * 3, np.int32)
    for _ in range(2):
        away = places - draw.uniform(0, side, 3)
        direction = draw.normal(size=3)
        direction /= np.linalg.norm(direction)
        along = away @ direction
        square = (away**2).sum(-1)
        # The radius of a tube is smaller.
        classes[square - along**2 < (side * draw.uniform(0.06, 0.1)) ** 2] = 2
        away = places - draw.uniform(side / 4, side * 3 / 4, 3)
        classes[(away**2).sum(-1) < (side * draw.uniform(0.15, 0.25)) ** 2] = 1
    noise = draw.normal(0, _NOISE, classes.shape)
    return ((classes > 0) + noise).astype(np.float32), classes


def batches(
    size: int, side: int, seed: int, held_out: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches without end: of volumes for training, or of others."""
    for first in itertools.count(0, size):
        found = [volume(seed, first + i, side, held_out) for i in range(size)]
        yield np.stack([image for image, _ in found]), np.stack([of for _, of in found])


def dice(found: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Returns the Dice score of each class but the background: twice what both share, over both."""
    scores = []
    for number in range(1, len(CLASSES)):
        both = [part == number for part in (found, wanted)]
        total = both[0].sum() + both[1].sum()
        scores.append(float(2 * (both[0] & both[1]).sum() / total) if total else 1.0)
    return scores
