"""Rotations, and how they are slowed down."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.named import Attention, RotaryScaling
from pipemesh.layers.named.positions import rotated
from tests.layers.named.harness import run, value_of

BASE, PAIRS = 1e4, 8


def angles_of(scaling):
    """How far each pair is turned at place 7, from (1, 0) on."""
    ones, zeros = np.ones([1, 1, 1, PAIRS], np.float32), np.zeros([1, 1, 1, PAIRS], np.float32)
    x = tf.constant(np.concatenate([ones, zeros], -1))
    turned = rotated(x, tf.constant([7]), BASE, scaling).numpy().reshape(2, PAIRS)
    return np.arctan2(turned[1], turned[0]) % (2 * np.pi)


PLAIN = 7 * BASE ** (-np.arange(PAIRS) / PAIRS)


def test_all_rotations_are_slower_by_a_factor():
    np.testing.assert_allclose(angles_of(None), PLAIN % (2 * np.pi), 1e-5, 1e-6)
    np.testing.assert_allclose(angles_of(RotaryScaling(5.0)), PLAIN / 5 % (2 * np.pi), 1e-5, 1e-6)


def test_long_wavelengths_alone_are_longer():
    """By the wavelengths, in tokens, as Llama 3.1 has it."""
    length, low, high, factor = 400, 1.0, 4.0, 8.0
    wanted = []
    for plain in PLAIN:
        wavelength = 2 * np.pi / (plain / 7)
        if wavelength < length / high:
            wanted.append(plain)
        elif wavelength > length / low:
            wanted.append(plain / factor)
        else:
            share = (length / wavelength - low) / (high - low)
            wanted.append((1 - share) * plain / factor + share * plain)
    shares = np.array(wanted) / PLAIN
    assert shares[0] == 1 and shares[-1] == 1 / factor and len(set(shares.round(6))) > 2
    found = angles_of(RotaryScaling(factor, length, low, high))
    np.testing.assert_allclose(found, np.array(wanted) % (2 * np.pi), 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((0.5,), "factor is 0.5; it must be 1 or more"),
        ((2.0, 0), "length is 0; it must be 1 or more"),
        ((2.0, 8, 4.0, 1.0), "low is 4.0 and high 1.0; both must be above 0"),
        ((2.0, 8, 0.0, 1.0), "low is 0.0 and high 1.0"),
    ],
)
def test_numbers_that_are_none(numbers, told):
    with pytest.raises(PipelineError, match=told):
        RotaryScaling(*numbers)


def test_attention_heeds_it_under_a_layout():
    params = Attention.Params().Set(name="attention", input_dim=8, num_heads=2, use_rotary=True)
    x = [value_of("x", [2, 9, 8])]
    plain = run(params, x, scale=None).outputs[0]
    params.rotary_scaling = RotaryScaling(3.0)
    found = run(params, x, scale=None).outputs[0]
    assert np.abs(found - plain).max() > 0.01
    split = run(params, x, "model:2", "heads:model", scale=None).outputs[0]
    np.testing.assert_allclose(split, found, 1e-4, 1e-5)
    with pytest.raises(PipelineError, match="give a RotaryScaling, or None"):
        params.Set(rotary_scaling=3.0).Instantiate()
