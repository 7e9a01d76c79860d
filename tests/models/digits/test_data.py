"""The embedded digits."""

import itertools

import numpy as np

from models.digits import data


def test_all_1797_digits_are_there_in_8_by_8():
    train, held_out = data.load_digits()
    assert (len(train), len(held_out)) == (1437, 360)
    for part in (train, held_out):
        assert part.images.shape[1:] == (8, 8) and part.images.dtype == np.float32
        assert part.images.min() == 0 and part.images.max() == 1
        assert set(part.labels.tolist()) == set(range(10))


def test_every_epoch_has_every_digit_once_in_an_order_of_its_own():
    numbered = data.Digits(np.arange(7)[:, None, None], np.arange(7))
    seen = [labels for _, labels in itertools.islice(numbered.batches(3, seed=1), 7)]
    assert all(len(labels) == 3 for labels in seen)
    epochs = np.concatenate(seen).reshape([3, 7])
    for epoch in epochs:
        assert sorted(epoch) == list(range(7))
    assert (epochs[0] != epochs[1]).any()
    images, labels = next(numbered.batches(3, seed=2))
    np.testing.assert_array_equal(images[:, 0, 0], labels)
    assert labels.tolist() != seen[0].tolist()


def test_batches_in_order_count_every_digit_once():
    numbered = data.Digits(np.arange(7)[:, None, None], np.arange(7))
    for size in (3, 7, 20):
        counted = []
        for images, labels, count in numbered.in_order(size):
            assert len(images) == len(labels) == size
            counted += labels[:count].tolist()
        assert counted == list(range(7))
