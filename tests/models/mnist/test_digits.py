"""The embedded digits."""

import itertools

import numpy as np
import pytest

from models.mnist import digits


@pytest.fixture(scope="module")
def loaded():
    return digits.load_digits()


def test_all_1797_digits_are_there_in_28_by_28(loaded):
    train, held_out = loaded
    assert (len(train), len(held_out)) == (1437, 360)
    for part in loaded:
        assert part.images.shape[1:] == (28, 28) and part.images.dtype == np.float32
        assert part.images.min() == 0 and 0.9 < part.images.max() <= 1
        assert set(part.labels.tolist()) == set(range(10))


def test_enlarging_is_linear_between_the_centres_of_pixels():
    ramp = np.broadcast_to(np.arange(8, dtype=np.float32), [1, 8, 8])
    large = digits.enlarge(ramp)
    assert large.shape == (1, 28, 28)
    # The centre of new column c lies at (c + 0.5) * 8 / 28 - 0.5 among the old ones.
    centres = np.clip((np.arange(28) + 0.5) * 8 / 28 - 0.5, 0, 7)
    np.testing.assert_allclose(large[0], np.broadcast_to(centres, [28, 28]), rtol=1e-5, atol=1e-6)
    turned = digits.enlarge(np.swapaxes(ramp, 1, 2))
    np.testing.assert_allclose(turned, large.swapaxes(1, 2), atol=1e-5)


def test_every_epoch_has_every_digit_once_in_an_order_of_its_own(loaded):
    numbered = digits.Digits(np.arange(7)[:, None, None], np.arange(7))
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
    numbered = digits.Digits(np.arange(7)[:, None, None], np.arange(7))
    for size in (3, 7, 20):
        counted = []
        for images, labels, count in numbered.in_order(size):
            assert len(images) == len(labels) == size
            counted += labels[:count].tolist()
        assert counted == list(range(7))
