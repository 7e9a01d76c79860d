"""Keras models as tasks."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import learner, optimizer, py_utils, schedule

from pipemesh.errors import PipelineError
from pipemesh.layers import KerasTask
from pipemesh.layers.keras_task import loss_mean, metric_means
from pipemesh.training import all_or_none
from tests.layers.harness import cluster

RNG = np.random.default_rng(0)
LOGITS = tf.constant(RNG.normal(size=[6, 5]).astype(np.float32))
NUMBERS = tf.constant([0, 1, 2, 3, 4, 0])
ONE_HOT = tf.one_hot(NUMBERS, 5)
PROBABILITY = tf.constant(RNG.uniform(size=[6, 1]).astype(np.float32))
BITS = tf.constant([0, 1, 1, 0, 1, 0])
STEPS = tf.constant(RNG.normal(size=[6, 3, 5]).astype(np.float32))
WEIGHTS = tf.constant([1.0, 0.5, 0.0, 2.0, 1.0, 1.0])


def keras_model(labels, outputs, weights, **compiled):
    """Returns the results of Keras for a model that returns its inputs."""
    model = keras.Sequential([keras.Input(outputs.shape[1:]), keras.layers.Identity()])
    model.compile(run_eagerly=True, **compiled)
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
    mean = metric_means("task", [metric])[metric]
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
    mean, total = loss_mean("task", "mse")(ONE_HOT, LOGITS, tf.zeros([6]))
    assert mean == total == 0


def test_what_keras_masks_counts_nowhere():
    ids = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [2, 2, 0]])
    model = keras.Sequential([keras.layers.Embedding(4, 5, mask_zero=True), keras.layers.Dense(1)])
    labels = tf.constant(RNG.normal(size=[4, 3, 1]).astype(np.float32))
    model.compile(loss="mse")
    wanted = model.evaluate(ids, labels.numpy(), verbose=0)
    mean, total = loss_mean("task", "mse")(labels, model(ids), None)
    np.testing.assert_allclose(mean, wanted, rtol=1e-5)
    assert total == np.count_nonzero(ids)


def accuracy(y_true, y_pred):
    """A function of the user's, with a name of Keras'."""
    return tf.fill(tf.shape(y_pred)[:1], 0.75)


def test_a_function_of_the_users_gets_all_outputs_whatever_its_name():
    def both(y_true, y_pred):
        return tf.abs(y_true[0] - y_pred[0])[:, 0] + tf.abs(y_true[1] - y_pred[1])[:, 0]

    labels = [PROBABILITY, PROBABILITY]
    mean, total = loss_mean("task", both)(labels, [PROBABILITY + 1, PROBABILITY - 2], None)
    np.testing.assert_allclose([mean, total], [3, 6], rtol=1e-6)
    mean = metric_means("task", [accuracy])["accuracy"]
    assert mean(ONE_HOT, LOGITS, None)[0] == 0.75


def area(y_true, y_pred):
    """Of the whole batch."""
    return tf.reduce_mean(y_pred)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: loss_mean("task", "nonsense"), "task: Keras knows no loss 'nonsense'"),
        (lambda: loss_mean("task", None), "task: it has no loss; set loss"),
        (lambda: metric_means("task", ["AUC"]), "metric 'AUC' is no function that says something"),
        (lambda: metric_means("task", [keras.metrics.AUC()]), "is no function that says something"),
        (lambda: metric_means("task", ["acuracy"]), "'acuracy' is no function .* give 'accuracy'"),
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
            lambda: metric_means("task", ["acc"])["acc"]([BITS, BITS], [PROBABILITY] * 2, None),
            "metric 'acc' is of one output, but the model has 2",
        ),
        (lambda: metric_means("task", [lambda a, b: a]), "cannot be named '<lambda>'"),
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


X = RNG.normal(1.0, 2.0, size=[10, 12, 6, 6, 2]).astype(np.float32)
Y = RNG.integers(3, size=[10, 12]).astype(np.int32)
LOSS = "sparse_categorical_crossentropy"
ROUND_OFF = {"rtol": 2e-4, "atol": 2e-6}


@pytest.fixture(autouse=True)
def lingvo_runs_eagerly(eagerly):
    """Keras needs it."""


def convolutional(dropout=0.0, **conv):
    """Equal weights each time."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input([6, 6, 2]),
            keras.layers.Conv2D(4, 3, activation="relu", **conv),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Flatten(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(3, activation="softmax"),
            keras.layers.BatchNormalization(momentum=0.8, center=False, scale=False),
            keras.layers.Softmax(),
        ]
    )


class Training:
    """Steps of lingvo's learner in eager mode, in one function."""

    def __init__(self, model, learning_rate=0.1, **params):
        p = KerasTask.Params().Set(**{"name": "task", "loss": LOSS, "model": model, **params})
        sgd, constant = optimizer.SGD.Params(), schedule.Constant.Params()
        p.train.learner = learner.Learner.Params().Set(
            name="loss", optimizer=sgd, learning_rate=learning_rate, lr_schedule=constant
        )
        with cluster(1):
            self.step = py_utils.GetOrCreateGlobalStepVar()
            self.step.assign(0)
            self.task = p.Instantiate()
        self.train = tf.function(self.train_eagerly, autograph=False)
        self._evaluate = tf.function(self._metrics, autograph=False)

    def _metrics(self, batch):
        return dict(self.task.FPropTower(self.task.theta, batch)[0])

    def train_eagerly(self, batch):
        with py_utils.GradientTape(), py_utils.GlobalStepContext(self.step):
            metrics = self._metrics(batch)
            _, update, _ = self.task.learners[0].Apply(
                metrics, self.task.vars, gradient_adjuster=all_or_none
            )
        with tf.control_dependencies([] if update is None else [update]):
            after = self.task.PostTrainingStepUpdate()
        with tf.control_dependencies([] if after is None else [after]):
            self.step.assign_add(1)
        return metrics

    def evaluate(self, batch):
        with cluster(1, do_eval=True):
            return self._evaluate(tf.nest.map_structure(tf.constant, batch))

    def variables(self):
        """In the order of Keras: by layer."""
        found = {v.name: v.numpy() for v in self.task.vars.Flatten()}
        names = ["conv2d_kernel", "conv2d_bias"]
        names += [f"batch_normalization_{n}" for n in ("gamma", "beta", *MOVING)]
        names += ["dense_kernel", "dense_bias"]
        names += [f"batch_normalization_1_{n}" for n in MOVING]
        assert len(names) == len(found)
        return [found[f"task/model/{name}/var:0"] for name in names]


MOVING = ("moving_mean", "moving_variance")


def trained_by_keras(model, **compiled):
    """The results of each step of Keras' own loop, and the model."""
    made = model()
    made.compile(optimizer=keras.optimizers.SGD(0.1), loss=LOSS, **compiled)
    results = []
    for x, y in zip(X, Y, strict=True):
        made.reset_metrics()
        results.append(made.train_on_batch(x, y, return_dict=True))
    return results, made


def kept(made):
    """Its variables but for seeds of dropout."""
    return [v.numpy() for v in made.variables if "seed_generator" not in v.path]


def assert_all_close(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, **ROUND_OFF)


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_steps_equal_those_of_train_on_batch_with_moving_averages():
    training = Training(convolutional, metrics=["accuracy"])
    before = training.variables()
    assert_all_close(before, kept(convolutional()))
    results, made = trained_by_keras(convolutional, metrics=["accuracy"])
    # The last step is without a function.
    for train, x, y, wanted in zip(
        [training.train] * (len(X) - 1) + [training.train_eagerly], X, Y, results, strict=True
    ):
        got = train((tf.constant(x), tf.constant(y)))
        np.testing.assert_allclose(got["loss"][0], wanted["loss"], rtol=1e-4)
        np.testing.assert_allclose(got["accuracy"][0], wanted["accuracy"], rtol=1e-6)
    assert_all_close(training.variables(), kept(made))
    for old, new in zip(before, training.variables(), strict=True):
        assert np.abs(new - old).max() > 1e-3
    # And so is what they say when nothing trains.
    made.reset_metrics()
    wanted = made.test_on_batch(X[0], Y[0], return_dict=True)
    got = training.evaluate((X[0], Y[0]))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(got[name][0], wanted[name], rtol=1e-4)
    fixed = [v.name for v in training.task.vars.Flatten() if not v.trainable]
    assert len(fixed) == 4 and all("moving_" in name for name in fixed)


@pytest.mark.parametrize(
    "conv",
    [
        {"kernel_regularizer": keras.regularizers.L2(0.05), "activity_regularizer": "l1"},
        {"kernel_constraint": keras.constraints.MaxNorm(0.3), "trainable": False},
        {"kernel_constraint": keras.constraints.MaxNorm(0.3)},
    ],
    ids=["penalties", "frozen", "constraint"],
)
def test_what_a_model_asks_of_its_trainer_is_done(conv):
    model = functools.partial(convolutional, **conv)
    results, made = trained_by_keras(model)
    training = Training(model)
    for x, y, wanted in zip(X, Y, results, strict=True):
        got = training.train((tf.constant(x), tf.constant(y)))
        np.testing.assert_allclose(got["loss"][0], wanted["loss"], rtol=1e-3)
    kernel = made.layers[0].kernel.numpy()
    ours = {v.name: v.numpy() for v in training.task.vars.Flatten()}
    np.testing.assert_allclose(ours["task/model/conv2d_kernel/var:0"], kernel, **ROUND_OFF)


def test_a_step_that_fails_changes_nothing():
    """Its moments are finite, its gradient is not: averages do not move before weights can."""
    training = Training(convolutional)
    batch = py_utils.NestedMap(
        inputs=tf.constant(X[0]), labels=tf.constant(Y[0]), weights=tf.ones([12])
    )
    training.train(batch)
    before = training.variables()
    bad = py_utils.NestedMap(batch, weights=tf.fill([12], np.float32(np.inf)))
    with pytest.raises(tf.errors.InvalidArgumentError):
        training.train(bad)
    assert_equal(training.variables(), before)
    # The next one is as if there had been none.
    training.train(batch)
    other = Training(convolutional)
    for _ in range(2):
        other.train(batch)
    assert_equal(training.variables(), other.variables())


def test_evaluation_changes_nothing_and_leaves_out_rows_without_weight():
    training = Training(convolutional, metrics=["accuracy"])
    before = training.variables()
    whole = training.evaluate((X[3], Y[3]))
    filled = np.concatenate([X[3], 100 * np.ones([4, 6, 6, 2], np.float32)])
    labels = np.concatenate([Y[3], np.zeros([4], np.int32)])
    weights = np.concatenate([np.ones([12]), np.zeros([4])]).astype(np.float32)
    padded = training.evaluate((filled, labels, weights))
    for name, (value, weight) in whole.items():
        np.testing.assert_allclose(padded[name][0], value, rtol=1e-5)
        assert padded[name][1] == weight == 12
    assert_equal(training.variables(), before)


def test_dropout_is_another_one_in_each_step_and_the_same_in_a_step_made_again():
    model = functools.partial(convolutional, dropout=0.5)
    batch = tf.constant(X[0]), tf.constant(Y[0])
    training, again = Training(model, learning_rate=0.0), Training(model, learning_rate=0.0)
    losses = [float(training.train(batch)["loss"][0]) for _ in range(3)]
    assert len(set(losses)) == 3
    again.step.assign(2)
    assert float(again.train(batch)["loss"][0]) == losses[2]


def test_inputs_may_be_nested():
    def model():
        a, b = keras.Input([2], name="a"), keras.Input([3], name="b")
        return keras.Model(
            {"a": a, "b": b}, keras.layers.Dense(1)(keras.layers.concatenate([a, b]))
        )

    training = Training(model, loss="mse")
    batch = {
        "inputs": {"a": tf.ones([4, 2]), "b": tf.ones([4, 3])},
        "labels": tf.zeros([4, 1]),
    }
    losses = [float(training.train(batch)["loss"][0]) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_it_computes_in_bfloat16_with_averages_in_float32():
    layers = [
        keras.Input([4]),
        keras.layers.BatchNormalization(momentum=0.999, dtype="mixed_bfloat16"),
        keras.layers.Dense(3, dtype="mixed_bfloat16"),
        keras.layers.Softmax(dtype="float32"),
    ]
    training = Training(lambda: keras.Sequential(layers))
    x = RNG.normal(1.0, 1.0, size=[12, 4]).astype(np.float32)
    for _ in range(40):
        training.train((tf.constant(x), tf.constant(Y[0])))
    averages = {v.name: v.numpy() for v in training.task.vars.Flatten()}
    rounded = tf.cast(x, tf.bfloat16).numpy().astype(np.float32)
    wanted = (1 - 0.999**40) * rounded.mean(axis=0)
    got = averages["task/model/moving_mean/var:0"]
    np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_a_batch_without_its_parts_says_what_is_missing():
    training = Training(convolutional)
    for batch, text in (
        ({"labels": tf.zeros([4])}, r"task: the batch has no 'inputs', but \['labels'\]"),
        ({"inputs": tf.ones([4, 6, 6, 2])}, r"task: the batch has no 'labels', but \['inputs'\]"),
        (tf.ones([4]), "a batch is an? .*Tensor; it must be a NestedMap"),
    ):
        with pytest.raises(PipelineError, match=text):
            training.evaluate(batch)
