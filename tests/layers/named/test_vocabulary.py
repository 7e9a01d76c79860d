"""Embeddings, positions and cross entropy equal plain TensorFlow under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import (
    Attention,
    Embedding,
    RotaryScaling,
    SoftmaxCrossEntropy,
    lowering_scope,
)
from pipemesh.layers.named.vocabulary import rotated
from tests.layers.named.harness import RULES, make_lowering, reference, run, value_of

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
    plain = run(params, x, scale=None, loss=None).outputs[0]
    params.rotary_scaling = RotaryScaling(3.0)
    found = run(params, x, scale=None, loss=None).outputs[0]
    assert np.abs(found - plain).max() > 0.01
    split = run(params, x, "model:2", "heads:model", scale=None, loss=None).outputs[0]
    np.testing.assert_allclose(split, found, 1e-4, 1e-5)
    with pytest.raises(PipelineError, match="give a RotaryScaling, or None"):
        params.Set(rotary_scaling=3.0).Instantiate()


IDS = np.array([[3, 0, 7, 7, 1], [5, 5, 2, 6, 4]], np.int32)
PLACES = np.array([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], np.int32)
EMBEDDING = Embedding.Params().Set(name="embedding", vocab_size=8, embedding_dim=4)


def waves(places):
    """By formula: sin and cos of `place / 10000 ** (i / (n - 1))`."""
    found = np.zeros([*places.shape, 4], np.float32)
    for i in range(2):
        angle = places / 10000.0**i
        found[..., i], found[..., 2 + i] = np.sin(angle), np.cos(angle)
    return found


# Other layouts equal one processor (tests/conformance).
@pytest.mark.parametrize(
    ("mesh", "positions"),
    [("data:2;model:2", "learned"), ("model:4", "sinusoidal"), ("model:2", "none")],
)
def test_results_and_gradients_are_those_of_plain_lookups(mesh, positions):
    params = EMBEDDING.Copy().Set(positions=positions, max_length=6, scale_sqrt_depth=True)

    def plain(w):
        x = tf.gather(w["table"], IDS) * 2.0
        if positions == "learned":
            return x + tf.gather(w["positions"], PLACES)
        return x + waves(PLACES) if positions == "sinusoidal" else x

    shapes = {"table": [8, 4]} | ({"positions": [6, 4]} if positions == "learned" else {})
    run(params, [IDS, PLACES], mesh).assert_close(*reference(plain, shapes))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_embed_may_be_split_instead_and_positions_are_places_by_default(positions):
    params = EMBEDDING.Copy().Set(positions=positions, max_length=5)
    places = np.arange(5)

    def plain(w):
        added = waves(places) if positions == "sinusoidal" else tf.gather(w["positions"], places)
        return tf.gather(w["table"], IDS) + added

    shapes = {"table": [8, 4]} | ({"positions": [5, 4]} if positions == "learned" else {})
    run(params, [IDS], "model:2", "embed:model").assert_close(*reference(plain, shapes))


def test_each_processor_has_its_rows_and_one_all_reduce():
    found = run(EMBEDDING, [IDS], "model:4")
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
        EMBEDDING.Copy().Set(**changes).Instantiate()


def test_sequences_longer_than_what_is_learned_are_an_error():
    with pytest.raises(
        PipelineError, match="sequences of 5 tokens were given, but max_length is 4"
    ):
        run(EMBEDDING.Copy().Set(positions="learned", max_length=4), [IDS])


def test_a_vocabulary_that_does_not_divide_is_an_error():
    with (
        lowering_scope(make_lowering("model:4")),
        pytest.raises(LayoutError, match=r"'vocab' of .* size 10, which .* cut into 4"),
    ):
        EMBEDDING.Copy().Set(vocab_size=10).Instantiate()


X = value_of("x", [2, 3, 5])
LABELS = np.array([[0, 7, 3], [4, 4, 6]], np.int32)
WEIGHTS = np.array([[1, 0.5, 0], [1, 1, 2]], np.float32)
SOFTMAX = SoftmaxCrossEntropy.Params().Set(name="softmax", input_dim=5, vocab_size=8)


def plain(smoothing=0.0, weights=WEIGHTS, x=X):
    def loss(w):
        logits = tf.einsum("btd,dv->btv", x, w["w"]) + w["b"]
        probabilities = tf.one_hot(LABELS, 8) * (1 - smoothing) + smoothing / 8
        xent = tf.nn.softmax_cross_entropy_with_logits(probabilities, logits)
        return tf.reduce_sum(xent * weights), tf.constant(weights.sum()), xent

    return reference(loss, {"w": [5, 8], "b": [8]})


@pytest.mark.parametrize(("mesh", "smoothing"), [("data:2;model:2", 0.2), ("model:4", 0.0)])
def test_loss_and_gradients_are_those_of_plain_tensorflow(mesh, smoothing):
    params = SOFTMAX.Copy().Set(label_smoothing=smoothing)
    run(params, [X, LABELS, WEIGHTS], mesh).assert_close(*plain(smoothing))


def test_weights_are_one_by_default():
    run(SOFTMAX, [X, LABELS], "data:2").assert_close(*plain(weights=np.ones([2, 3], np.float32)))


def test_weights_are_not_rounded_to_what_products_are_computed_in():
    """In bfloat16 a third and 257 were other numbers, and the loss was divided by their sum."""
    weights = np.array([[1 / 3, 257, 0], [1, 1, 2]], np.float32)
    params = SOFTMAX.Copy().Set(fprop_dtype=tf.bfloat16)
    found = run(params, [X, LABELS, weights], "data:2;model:2", loss=None)
    np.testing.assert_allclose(found.outputs[1], weights.sum(), rtol=1e-7)
    integers = np.array([[1, 300, 0], [1, 1, 2]])
    of_integers = run(params, [X, LABELS, integers], "data:2;model:2", loss=None)
    assert of_integers.outputs[1] == 305


def test_large_logits_do_not_overflow():
    run(SOFTMAX, [X * 1000, LABELS, WEIGHTS], "model:2").assert_close(*plain(x=X * 1000), rtol=1e-3)


def test_no_device_has_all_logits():
    params = SOFTMAX.Copy().Set(vocab_size=1024)
    lowering = make_lowering("model:4")
    sizes = []

    def call(layer, theta, *args):
        outputs = layer.FProp(theta, *args)
        for operation in tf.compat.v1.get_default_graph().get_operations():
            sizes.extend(output.shape.num_elements() or 0 for output in operation.outputs)
        return outputs

    run(params, [X, LABELS], "model:4", call=call, calls=lowering)
    assert max(sizes) == 2 * 3 * 1024 / 4


@pytest.mark.parametrize("smoothing", [1.0, -0.1, None])
def test_a_smoothing_that_is_no_part_is_an_error(smoothing):
    with pytest.raises(PipelineError, match=r"label_smoothing is .* below 1"):
        SOFTMAX.Copy().Set(label_smoothing=smoothing).Instantiate()


def test_rules_for_other_layers_do_not_matter():
    with lowering_scope(make_lowering("data:2;model:2", RULES + ";columns:model")):
        assert SOFTMAX.Copy().Instantiate().weight_parts()["w_slice_1"].holders == (1, 3)
