"""Embeddings of tokens and positions."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import Attention, Embedding, RotaryScaling, lowering_scope
from pipemesh.layers.named.embedding import rotated
from tests.layers.named.harness import MESHES, make_lowering, reference, run, value_of

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


IDS = np.array([[3, 0, 7, 7, 1], [5, 5, 2, 6, 4]], np.int32)
PLACES = np.array([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], np.int32)
PARAMS = Embedding.Params().Set(name="embedding", vocab_size=8, embedding_dim=4)


def waves(places):
    """By formula: sin and cos of `place / 10000 ** (i / (n - 1))`."""
    found = np.zeros([*places.shape, 4], np.float32)
    for i in range(2):
        angle = places / 10000.0**i
        found[..., i], found[..., 2 + i] = np.sin(angle), np.cos(angle)
    return found


@pytest.mark.parametrize(
    ("mesh", "positions"),
    [*((mesh, "learned") for mesh in MESHES), ("model:2", "sinusoidal"), ("model:2", "none")],
)
def test_results_and_gradients_are_those_of_plain_lookups(mesh, positions):
    params = PARAMS.Copy().Set(positions=positions, max_length=6, scale_sqrt_depth=True)

    def plain(w):
        x = tf.gather(w["table"], IDS) * 2.0
        if positions == "learned":
            return x + tf.gather(w["positions"], PLACES)
        return x + waves(PLACES) if positions == "sinusoidal" else x

    shapes = {"table": [8, 4]} | ({"positions": [6, 4]} if positions == "learned" else {})
    run(params, [IDS, PLACES], mesh).assert_close(*reference(plain, shapes))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_embed_may_be_split_instead_and_positions_are_places_by_default(positions):
    params = PARAMS.Copy().Set(positions=positions, max_length=5)
    places = np.arange(5)

    def plain(w):
        added = waves(places) if positions == "sinusoidal" else tf.gather(w["positions"], places)
        return tf.gather(w["table"], IDS) + added

    shapes = {"table": [8, 4]} | ({"positions": [5, 4]} if positions == "learned" else {})
    run(params, [IDS], "model:2", "embed:model").assert_close(*reference(plain, shapes))


def test_each_processor_has_its_rows_and_one_all_reduce():
    found = run(PARAMS, [IDS], "model:4")
    assert found.lowering.costs.rows[("model",), "all_reduce", "forward"][0] == 1
    assert value_of("table", [8, 4]).shape == found.grads["table"].shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "learnt"}, "positions is 'learnt'; did you mean 'learned'"),
        ({"positions": "learned"}, "max_length is None"),
        ({"positions": "sinusoidal", "embedding_dim": 3}, "embedding_dim is 3; .* an even one"),
    ],
)
def test_params_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(PipelineError, match=message):
        PARAMS.Copy().Set(**changes).Instantiate()


def test_sequences_longer_than_what_is_learned_are_an_error():
    with pytest.raises(
        PipelineError, match="sequences of 5 tokens were given, but max_length is 4"
    ):
        run(PARAMS.Copy().Set(positions="learned", max_length=4), [IDS])


def test_a_vocabulary_that_does_not_divide_is_an_error():
    with (
        lowering_scope(make_lowering("model:4")),
        pytest.raises(LayoutError, match=r"'vocab' of .* size 10, which .* cut into 4"),
    ):
        PARAMS.Copy().Set(vocab_size=10).Instantiate()
