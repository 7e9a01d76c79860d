"""The embedded digits, and the datasets made of them."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from models.digits import data, datasets
from models.digits.data import Digits


def test_all_1797_digits_are_there_in_8_by_8():
    train, held_out = data.load_digits()
    assert (len(train), len(held_out)) == (1437, 360)
    for part in (train, held_out):
        assert part.images.shape[1:] == (8, 8) and part.images.dtype == np.float32
        assert part.images.min() == 0 and part.images.max() == 1
        assert set(part.labels.tolist()) == set(range(10))


# The image of label 3 is all 3.
NUMBERED = Digits(
    np.broadcast_to(np.arange(7, dtype=np.float32)[:, None, None], [7, 2, 2]),
    np.arange(7, dtype=np.int32),
)


@pytest.mark.parametrize("read", [NUMBERED.batches, functools.partial(datasets.shuffled, NUMBERED)])
def test_every_epoch_has_every_digit_once_in_an_order_of_its_own(read):
    def labels_of(seed):
        return [np.asarray(labels).tolist() for _, labels in itertools.islice(read(3, seed), 7)]

    first = labels_of(1)
    assert all(len(labels) == 3 for labels in first)
    epochs = np.reshape(first, [3, 7])
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert labels_of(1) == first != labels_of(2)
    images, labels = next(iter(read(3, 1)))
    np.testing.assert_array_equal(np.reshape(images, [3, 2, 2])[:, 0, 1], labels)


def test_images_are_moved_by_a_pixel_at_most_and_never_wrap_around():
    image = np.arange(1, 10, dtype=np.float32).reshape([1, 3, 3])
    one = Digits(np.repeat(image, 400, axis=0), np.zeros([400], np.int32))
    images, _ = next(iter(datasets.shuffled(one, 400, seed=1, shift=1)))
    around = np.pad(image[0], 1)
    wanted = {around[y : y + 3, x : x + 3].tobytes() for y in range(3) for x in range(3)}
    assert {moved[..., 0].tobytes() for moved in images.numpy()} == wanted


def test_a_batch_may_be_larger_than_an_epoch():
    _, labels = next(iter(datasets.shuffled(NUMBERED, 20, seed=1)))
    assert sorted(np.bincount(labels)) == [2] + [3] * 6


@pytest.mark.parametrize("read", [0, 1, 5])
def test_a_saved_iterator_is_all_that_is_needed_to_go_on(tmp_path, read):
    iterator = iter(datasets.shuffled(NUMBERED, 3, seed=1, shift=1))
    for _ in range(read):
        next(iterator)
    path = tf.train.Checkpoint(it=iterator).write(str(tmp_path / "place"))
    # As another process would: from a dataset that was made anew.
    again = iter(datasets.shuffled(NUMBERED, 3, seed=1, shift=1))
    tf.train.Checkpoint(it=again).read(path).assert_consumed()
    for _ in range(6):
        for got, wanted in zip(next(again), next(iterator), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [3, 7, 20])
def test_in_order_every_digit_counts_once(size):
    counted = []
    for images, labels, weights in datasets.in_order(NUMBERED, size):
        assert images.shape == (size, 2, 2, 1) and labels.shape == weights.shape == (size,)
        counted += labels.numpy()[weights.numpy() == 1].tolist()
        np.testing.assert_array_equal(images.numpy()[weights.numpy() == 0], 0)
        assert set(weights.numpy().tolist()) <= {0.0, 1.0}
    assert counted == list(range(7))
    counted = []
    for images, labels, count in NUMBERED.in_order(size):
        assert len(images) == len(labels) == size
        counted += labels[:count].tolist()
    assert counted == list(range(7))
