"""scikit-learn's handwritten digits, enlarged to MNIST's 28 x 28."""

from __future__ import annotations

import numpy as np

from ..digits import data

SIDE = 28
NUM_CLASSES = data.NUM_CLASSES


def load_digits() -> tuple[data.Digits, data.Digits]:
    """1,437 digits to train on, and 360 held out, which other people wrote.

    Raises:
        PipemeshError: scikit-learn is not installed.
    """
    train, held_out = data.load_digits()
    return (
        data.Digits(enlarge(train.images), train.labels),
        data.Digits(enlarge(held_out.images), held_out.labels),
    )


def enlarge(images: np.ndarray) -> np.ndarray:
    """Scales images of shape [n, 8, 8] up to 28 x 28, linearly between the pixels' centres."""
    matrix = _interpolation(images.shape[1], SIDE)
    return np.einsum("nij,ri,cj->nrc", images, matrix, matrix, optimize=True)


def _interpolation(old: int, new: int) -> np.ndarray:
    """[new, old]: each new pixel as a mean of the old ones next to it."""
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    distance = np.abs(centres[:, None] - np.arange(old)[None])
    return np.maximum(0, 1 - distance).astype(np.float32)
