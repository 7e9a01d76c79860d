"""A text file as rows of tokens."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import DataError

from . import config as configs
from . import tokenizer


def rows_of(path: str, folder: str, length: int) -> dict[str, np.ndarray]:
    """Returns the tokens of a file in rows of `length`, each with the next token as label.

    It has `ids`, `labels`, `weights`, `segment_ids` and `segment_pos`, each `[rows, length]`.
    Padding of the last row has weight 0 and a separate segment. A missing text or tokenizer raises
    DataError.
    """
    found = tokenizer.load(folder, configs.read(os.path.join(folder, configs.FILE)))
    if found is None:
        raise DataError(
            f"text {path!r} cannot be cut into tokens: {folder!r} has neither {tokenizer.JSON} nor "
            f"{tokenizer.SENTENCEPIECE}; put the one there that came with the weights"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            ids = np.array(found.encode(file.read()), np.int32)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"text {path!r} cannot be read ({reason})") from error
    if len(ids) < 2:
        raise DataError(f"text {path!r} has {len(ids)} tokens; give a longer one")
    number = len(ids) - 1
    sizes = -(-number // length), length

    def cut(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, sizes[0] * length - number)).reshape(sizes)

    ones = cut(np.ones([number], np.int32))
    return {
        "ids": cut(ids[:-1]),
        "labels": cut(ids[1:]),
        "weights": ones.astype(np.float32),
        "segment_ids": ones,
        "segment_pos": np.tile(np.arange(length, dtype=np.int32), (sizes[0], 1)),
    }


def train_dataset(
    path: str, folder: str, length: int, batch_size: int, seed: int
) -> tf.data.Dataset:
    """Returns batches without end; the order of each epoch is a function of the seed.

    A batch may span two epochs.
    """
    rows = rows_of(path, folder, length)
    number = len(rows["ids"])
    tensors = {name: tf.constant(value) for name, value in rows.items()}

    def epoch_of(epoch: tf.Tensor) -> tf.data.Dataset:
        key = tf.stack([tf.constant(seed, tf.int64), epoch])
        order = tf.argsort(tf.random.stateless_uniform([number], key))
        return tf.data.Dataset.from_tensor_slices(order)

    chosen = tf.data.Dataset.counter().flat_map(epoch_of).batch(batch_size, drop_remainder=True)
    return chosen.map(lambda at: {name: tf.gather(t, at) for name, t in tensors.items()})


def heldout_dataset(path: str, folder: str, length: int, batch_size: int) -> tf.data.Dataset:
    """Returns all rows once, in order; the last batch may be smaller."""
    rows: Any = rows_of(path, folder, length)
    return tf.data.Dataset.from_tensor_slices(rows).batch(batch_size)
