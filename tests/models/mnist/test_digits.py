"""The digits, enlarged."""

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
