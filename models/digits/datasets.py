"""The digits as tf.data datasets of batches."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from .data import Digits, load_digits


def train_dataset(batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns the training digits, each moved by at most a pixel; see `shuffled`."""
    return shuffled(load_digits()[0], batch_size, seed, shift=1)


def heldout_dataset(batch_size: int) -> tf.data.Dataset:
    """Returns the held-out digits; see `in_order`."""
    return in_order(load_digits()[1], batch_size)


def shuffled(digits: Digits, batch_size: int, seed: int, shift: int = 0) -> tf.data.Dataset:
    """Returns batches without end; each epoch has its own order and includes every image.

    Order and shifts of an epoch are a function of the seed and its number, so a saved iterator is
    enough to resume. A batch may span two epochs. Images move by at most `shift` pixels in each
    direction.
    """
    border = [[0, 0], [shift, shift], [shift, shift], [0, 0]]
    images, labels = tf.pad(digits.images[..., None], border), tf.constant(digits.labels)
    shape = digits.images.shape[1:]

    def epoch_of(number: tf.Tensor) -> tf.data.Dataset:
        seeds = [tf.stack([tf.constant(seed, tf.int64), 2 * number + i]) for i in range(2)]
        order = tf.argsort(tf.random.stateless_uniform([len(digits)], seeds[0]))
        begins = tf.random.stateless_uniform(
            [len(digits), 2], seeds[1], maxval=2 * shift + 1, dtype=tf.int32
        )
        return tf.data.Dataset.from_tensor_slices((order, begins))

    def example(number: tf.Tensor, begin: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        corner = tf.concat([begin, [0]], 0)
        return tf.slice(tf.gather(images, number), corner, [*shape, 1]), tf.gather(labels, number)

    examples = tf.data.Dataset.counter().flat_map(epoch_of).map(example)
    return examples.batch(batch_size, drop_remainder=True)


def in_order(digits: Digits, batch_size: int) -> tf.data.Dataset:
    """Returns all images once; empty images of weight 0 pad the last batch."""
    missing = -len(digits) % batch_size

    def filled(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros([missing, *values.shape[1:]], values.dtype)])

    weights = filled(np.ones([len(digits)], np.float32))
    rows = filled(digits.images[..., None]), filled(digits.labels), weights
    return tf.data.Dataset.from_tensor_slices(rows).batch(batch_size, drop_remainder=True)
