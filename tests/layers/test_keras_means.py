"""Weighted means of Keras' losses and metrics equal those of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.keras_means import loss_mean, metric_mean, metric_means

RNG = np.random.default_rng(0)
LOGITS = tf.constant(RNG.normal(size=[6, 5]).astype(np.float32))
NUMBERS = tf.constant([0, 1, 2, 3, 4, 0])
ONE_HOT = tf.one_hot(NUMBERS, 5)
PROBABILITY = tf.constant(RNG.uniform(size=[6, 1]).astype(np.float32))
BITS = tf.constant([0, 1, 1, 0, 1, 0])
STEPS = tf.constant(RNG.normal(size=[6, 3, 5]).astype(np.float32))
WEIGHTS = tf.constant([1.0, 0.5, 0.0, 2.0, 1.0, 1.0])


def keras_model(labels, outputs, weights, **compiled):
    """What Keras says of a model that gives its inputs."""
    model = keras.Sequential([keras.Input(outputs.shape[1:]), keras.layers.Identity()])
    model.compile(**compiled)
    weights = None if weights is None else weights.numpy()
    return model.evaluate(
        outputs.numpy(), labels.numpy(), sample_weight=weights, verbose=0, return_dict=True
    )


def nothing(y_true, y_pred):
    """For a model whose metrics are looked at."""
    return 0 * y_pred[..., 0]


@pytest.mark.parametrize(
    ("loss", "labels", "outputs"),
    [
        ("mse", ONE_HOT, LOGITS),
        ("mean_absolute_error", ONE_HOT, LOGITS),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), NUMBERS, LOGITS),
        (keras.losses.CategoricalCrossentropy(True, label_smoothing=0.1), ONE_HOT, LOGITS),
        ("binary_crossentropy", BITS, PROBABILITY),
        ("binary_crossentropy", BITS[:, None], PROBABILITY),
        ("mse", BITS[:, None], PROBABILITY[:, 0]),
        (lambda y_true, y_pred: tf.reduce_max(tf.abs(y_true - y_pred), -1), ONE_HOT, LOGITS),
    ],
)
def test_a_loss_is_that_of_keras(loss, labels, outputs):
    mean, total = loss_mean("task", loss)(labels, outputs, None)
    wanted = keras_model(labels, outputs, None, loss=loss)["loss"]
    np.testing.assert_allclose(mean, wanted, rtol=1e-5)
    assert total == 6
    # With weights, Keras divides by the number of examples.
    mean, total = loss_mean("task", loss)(labels, outputs, WEIGHTS)
    wanted = keras_model(labels, outputs, WEIGHTS, loss=loss)["loss"]
    assert total == tf.reduce_sum(WEIGHTS)
    np.testing.assert_allclose(mean * total / 6, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("metric", "labels", "outputs"),
    [
        ("accuracy", NUMBERS, LOGITS),
        ("accuracy", NUMBERS[:, None], LOGITS),
        ("accuracy", ONE_HOT, LOGITS),
        ("acc", BITS, PROBABILITY),
        ("accuracy", BITS[:, None], PROBABILITY),
        ("sparse_top_k_categorical_accuracy", NUMBERS, LOGITS),
        ("mean_squared_error", ONE_HOT, LOGITS),
    ],
)
def test_a_metric_is_that_of_keras_with_the_same_weights(metric, labels, outputs):
    name, mean = metric_mean("task", metric)
    assert name == metric
    for weights in (None, WEIGHTS):
        value, _ = mean(labels, outputs, weights)
        # Keras calls only those that are compiled as weighted with weights.
        told = keras_model(labels, outputs, weights, loss=nothing, weighted_metrics=[metric])
        np.testing.assert_allclose(value, told[metric], rtol=1e-5)


def test_steps_of_an_example_have_its_weight():
    labels = tf.constant(RNG.integers(5, size=[6, 3]))
    loss = loss_mean("task", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    mean, total = loss(labels, STEPS, WEIGHTS)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, STEPS)
    wanted = tf.reduce_sum(each * WEIGHTS[:, None]) / (3 * tf.reduce_sum(WEIGHTS))
    np.testing.assert_allclose(mean, wanted, rtol=1e-5)
    assert total == 3 * tf.reduce_sum(WEIGHTS)
    one_each, _ = loss(labels, STEPS, tf.repeat(WEIGHTS[:, None], 3, axis=1))
    np.testing.assert_allclose(one_each, mean, rtol=1e-6)


def test_what_keras_masks_counts_nowhere():
    ids = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [2, 2, 0]])
    model = keras.Sequential([keras.layers.Embedding(4, 5, mask_zero=True), keras.layers.Dense(1)])
    labels = tf.constant(RNG.normal(size=[4, 3, 1]).astype(np.float32))
    model.compile(loss="mse")
    wanted = model.evaluate(ids, labels.numpy(), verbose=0)
    mean, total = loss_mean("task", "mse")(labels, model(ids), None)
    np.testing.assert_allclose(mean, wanted, rtol=1e-5)
    assert total == np.count_nonzero(ids)


def test_without_weight_the_mean_is_0():
    mean, total = loss_mean("task", "mse")(ONE_HOT, LOGITS, tf.zeros([6]))
    assert mean == total == 0


def accuracy(y_true, y_pred):
    """A function of the user's, with a name of Keras'."""
    return tf.fill(tf.shape(y_pred)[:1], 0.75)


def test_a_function_of_the_users_is_called_whatever_its_name():
    name, mean = metric_mean("task", accuracy)
    assert name == "accuracy" and mean(ONE_HOT, LOGITS, None)[0] == 0.75


def test_a_function_of_the_users_gets_all_outputs():
    def both(y_true, y_pred):
        return tf.abs(y_true[0] - y_pred[0])[:, 0] + tf.abs(y_true[1] - y_pred[1])[:, 0]

    labels = [PROBABILITY, PROBABILITY]
    mean, total = loss_mean("task", both)(labels, [PROBABILITY + 1, PROBABILITY - 2], None)
    np.testing.assert_allclose([mean, total], [3, 6], rtol=1e-6)


def area(y_true, y_pred):
    """Of the whole batch."""
    return tf.reduce_mean(y_pred)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: loss_mean("task", "nonsense"), "task: Keras knows no loss 'nonsense'"),
        (lambda: loss_mean("task", None), "task: it has no loss; set loss"),
        (lambda: metric_mean("task", "AUC"), "metric 'AUC' is no function that says something"),
        (lambda: metric_mean("task", keras.metrics.AUC()), "is no function that says something"),
        (lambda: metric_mean("task", "acuracy"), "'acuracy' is no function .* give 'accuracy'"),
        (lambda: loss_mean("task", {"a": "mse"}), "loss is a dict, .*; give one function of all"),
        (lambda: loss_mean("task", ["mse", "mae"]), "loss is a list, .*; give one function of all"),
        (lambda: metric_means("task", [accuracy, "accuracy"]), "two metrics are named 'accuracy'"),
        (
            lambda: loss_mean("task", "mse")([BITS, BITS], [PROBABILITY] * 2, None),
            "loss 'mse' is of one output, but the model has 2; give a function of all",
        ),
        (
            lambda: loss_mean("task", keras.losses.Huber())([BITS], {"a": PROBABILITY}, None),
            "is of one output, but the model has 1; give a function of all",
        ),
        (
            lambda: metric_mean("task", "acc")[1]([BITS, BITS], [PROBABILITY] * 2, None),
            "metric 'acc' is of one output, but the model has 2",
        ),
        (lambda: metric_mean("task", lambda a, b: a), "cannot be named '<lambda>'"),
        (lambda: loss_mean("task", area)(ONE_HOT, LOGITS, None), "a scalar for the whole batch"),
        (
            lambda: loss_mean("task", "mse")(ONE_HOT, LOGITS, tf.ones([5])),
            r"values of shape \(6,\), but weights have shape \(5,\)",
        ),
        (
            lambda: loss_mean("task", "mse")(ONE_HOT, LOGITS, tf.ones([6, 1])),
            r"weights have shape \(6, 1\); give one for each example, \[6\]",
        ),
    ],
)
def test_what_has_no_weighted_mean_says_what_to_give(call, text):
    with pytest.raises(PipelineError, match=text):
        call()
