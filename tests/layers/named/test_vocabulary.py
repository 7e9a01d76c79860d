"""Embeddings, positions and cross entropy equal plain TensorFlow under every layout."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import cluster_factory

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import Attention, Embedding, RotaryScaling, SoftmaxCrossEntropy
from pipemesh.layers.named.vocabulary import rotated
from tests.layers.named.harness import RULES, run, value_of

pytestmark = pytest.mark.gpu

BASE, PAIRS = 1e4, 8
PLAIN = 7 * BASE ** (-np.arange(PAIRS) / PAIRS)


def assert_angles(scaling, wanted):
    """Compares how far each pair is turned at place 7, from (1, 0) on."""
    ones, zeros = np.ones([1, 1, 1, PAIRS], np.float32), np.zeros([1, 1, 1, PAIRS], np.float32)
    x = tf.constant(np.concatenate([ones, zeros], -1))
    turned = rotated(x, tf.constant([7]), BASE, scaling).numpy().reshape(2, PAIRS)
    found = np.arctan2(turned[1], turned[0]) % (2 * np.pi)
    np.testing.assert_allclose(found, np.array(wanted) % (2 * np.pi), 1e-5, 1e-6)


def test_all_rotations_are_slower_by_a_factor():
    assert_angles(None, PLAIN)
    assert_angles(RotaryScaling(5.0), PLAIN / 5)


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
    assert_angles(RotaryScaling(factor, length, low, high), wanted)


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
    plain = run(params, x, initial=True, loss=None).outputs[0]
    params.rotary_scaling = RotaryScaling(3.0)
    found = run(params, x, initial=True, loss=None).outputs[0]
    assert np.abs(found - plain).max() > 0.01
    split = run(params, x, "model:2", "heads:model", initial=True, loss=None).outputs[0]
    np.testing.assert_allclose(split, found, 1e-4, 1e-5)


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
    ("mesh", "rules", "positions", "places"),
    [
        ("model:2", RULES, "learned", PLACES),
        ("model:2", RULES, "sinusoidal", PLACES),
        ("model:2", RULES, "none", None),
        ("model:2", "embed:model", "learned", None),
    ],
)
def test_results_and_gradients_are_those_of_plain_lookups(mesh, rules, positions, places):
    is_scaled = places is not None
    params = EMBEDDING.Copy().Set(positions=positions, max_length=5, scale_sqrt_depth=is_scaled)
    at = np.arange(5) if places is None else places
    added = {
        "learned": lambda w: tf.gather(w["positions"], at),
        "sinusoidal": lambda w: waves(at),
        "none": lambda w: 0.0,
    }[positions]
    found = run(params, [IDS, places], mesh, rules)
    found.assert_plain(lambda w: tf.gather(w["table"], IDS) * (1.0 + is_scaled) + added(w))
    # Each processor has its rows.
    number = found.lowering.costs.rows.get((("model",), "all_reduce", "forward"), (0, 0))[0]
    assert number == (rules == RULES)


def test_sequences_longer_than_what_is_learned_are_an_error():
    with pytest.raises(
        PipelineError, match="sequences of 5 tokens were given, but max_length is 4"
    ):
        run(EMBEDDING.Copy().Set(positions="learned", max_length=4), [IDS])


X = value_of("x", [2, 3, 5])
LABELS = np.array([[0, 7, 3], [4, 4, 6]], np.int32)
WEIGHTS = np.array([[1, 0.5, 0], [1, 1, 2]], np.float32)
SOFTMAX = SoftmaxCrossEntropy.Params().Set(name="softmax", input_dim=5, vocab_size=8)


@pytest.mark.parametrize(
    ("smoothing", "weights", "x", "rtol"),
    [
        pytest.param(0.2, WEIGHTS, X, 2e-4, id="smoothing"),
        pytest.param(0.0, None, X, 2e-4, id="weights of one by default"),
        pytest.param(0.0, WEIGHTS, X * 1000, 1e-3, id="large logits"),
    ],
)
def test_loss_and_gradients_are_those_of_plain_tensorflow(smoothing, weights, x, rtol):
    def plain(w):
        logits = tf.einsum("btd,dv->btv", x, w["w"]) + w["b"]
        probabilities = tf.one_hot(LABELS, 8) * (1 - smoothing) + smoothing / 8
        xent = tf.nn.softmax_cross_entropy_with_logits(probabilities, logits)
        counts = np.ones([2, 3], np.float32) if weights is None else weights
        return tf.reduce_sum(xent * counts), tf.constant(counts.sum()), xent

    params = SOFTMAX.Copy().Set(label_smoothing=smoothing)
    run(params, [x, LABELS, weights], "model:2").assert_plain(plain, rtol=rtol)


@pytest.mark.parametrize(("mesh", "multiple"), [("data:2;model:2", 1), ("model:2", 3)])
def test_z_loss_is_the_formula_of_its_paper(mesh, multiple):
    """Of 7 tokens, in padded slices; evaluation and each label's cross entropy are without."""
    labels = LABELS % 7

    def plain(w):
        logits = tf.einsum("btd,dv->btv", X, w["w"]) + w["b"]
        log_z = tf.math.log(tf.reduce_sum(tf.exp(logits), -1))
        right = tf.reduce_sum(tf.one_hot(labels, 7) * logits, -1)
        each = log_z - right + 0.3 * log_z**2
        return tf.reduce_sum(each * WEIGHTS), tf.constant(WEIGHTS.sum()), log_z - right

    params = SOFTMAX.Copy().Set(vocab_size=7, vocab_multiple=multiple, z_loss=0.3)
    run(params, [X, labels, WEIGHTS], mesh).assert_plain(plain)

    def evaluated(layer, theta, *args):
        with cluster_factory.SetEval(True):
            return layer.FProp(theta, *args)

    found = run(params, [X, labels, WEIGHTS], mesh, call=evaluated)
    without = run(params.Copy().Set(z_loss=0.0), [X, labels, WEIGHTS], mesh)
    np.testing.assert_array_equal(found.outputs[0], without.outputs[0])


def test_weights_are_not_rounded_to_what_products_are_computed_in():
    """In bfloat16 a third and 257 were other numbers, and the loss was divided by their sum."""
    weights = np.array([[1 / 3, 257, 0], [1, 1, 2]], np.float32)
    params = SOFTMAX.Copy().Set(fprop_dtype=tf.bfloat16)
    found = run(params, [X, LABELS, weights], "data:2;model:2", loss=None)
    np.testing.assert_allclose(found.outputs[1], weights.sum(), rtol=1e-7)
    integers = np.array([[1, 300, 0], [1, 1, 2]])
    of_integers = run(params, [X, LABELS, integers], "data:2;model:2", loss=None)
    assert of_integers.outputs[1] == 305


SMOOTHED = SOFTMAX.Copy().Set(label_smoothing=0.2, vocab_size=7)


def decode(layer, theta, x):
    return layer._Next(theta, x, np.array([0, 2]))


@pytest.fixture(scope="module")
def seven():
    """Loss and next logits of a vocabulary of 7."""
    return run(SMOOTHED, [X, LABELS, WEIGHTS]), run(SMOOTHED, [X], call=decode)


# 7 tokens over 2 or 3 processors; with a multiple also where nothing is split.
PADDED = [("data:2;model:2", 1), ("model:3", 1), ("model:1", 4), ("model:2", 3)]


@pytest.mark.parametrize(("mesh", "multiple"), PADDED)
def test_a_vocabulary_that_does_not_divide_has_the_results_of_the_whole_one(mesh, multiple, seven):
    """Its last slice is padded. Labels beyond the vocabulary have logits of 0, as without."""
    ids, (whole, following) = IDS % 8, seven
    found = run(EMBEDDING.Copy().Set(vocab_size=7, vocab_multiple=multiple), [ids], mesh)
    found.assert_plain(lambda w: tf.gather(tf.pad(w["table"], [[0, 1], [0, 0]]), ids))
    params = SMOOTHED.Copy().Set(vocab_multiple=multiple)
    found = run(params, [X, LABELS, WEIGHTS], mesh)
    found.assert_close(whole)
    assert found.shapes == whole.shapes == {"w": (5, 7), "b": (7,)}
    run(params, [X], mesh, call=decode).assert_close(following)


def test_a_whole_weight_may_be_given_for_padded_slices():
    table = value_of("table", [7, 4])

    def call(layer, theta, ids):
        whole = theta.copy()
        whole.table = tf.constant(table)
        return layer.FProp(whole, ids)

    found = run(EMBEDDING.Copy().Set(vocab_size=7), [IDS % 7], "model:2", call=call, loss=None)
    np.testing.assert_array_equal(found.outputs[0], table[IDS % 7])


def test_a_slice_of_padding_alone_is_an_error():
    with pytest.raises(LayoutError, match="size 7; in 4 slices, each a multiple of 4, the last"):
        run(SOFTMAX.Copy().Set(vocab_size=7, vocab_multiple=4), [X, LABELS], "model:4")


def test_no_device_has_all_logits():
    sizes = []

    def call(layer, theta, *args):
        outputs = layer.FProp(theta, *args)
        for operation in tf.compat.v1.get_default_graph().get_operations():
            sizes.extend(output.shape.num_elements() or 0 for output in operation.outputs)
        return outputs

    run(SOFTMAX.Copy().Set(vocab_size=1024), [X, LABELS], "model:4", call=call)
    assert max(sizes) == 2 * 3 * 1024 / 4
