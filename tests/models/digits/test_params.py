"""The registered classifiers of digits: they learn, and a pipeline changes nothing but speed."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo import model_registry
from lingvo.core import bn_layers

from models.digits import params
from models.digits.keras_model import DigitsKeras
from tests.models.digits.training import Training, assert_same_weights, batches_of

ALL = [params.DigitsPlain, params.DigitsPipelined, DigitsKeras]
PLAIN_AT_LENGTH = pytest.param(params.DigitsPlain, marks=pytest.mark.exhaustive)
MESHES = {params.DigitsPipelined: "layers:2"}


@pytest.fixture(autouse=True)
def lingvo_runs_eagerly(eagerly):
    """All of these train in TF2."""


def small(cls, **settings):
    settings = {"BATCH_SIZE": 16, "CHANNELS": (4, 8), **settings}
    return type(cls.__name__, (cls,), settings)()


@pytest.mark.parametrize("cls", ALL)
def test_it_is_registered_with_lingvo(cls):
    name = f"{cls.__module__.removeprefix('models.')}.{cls.__name__}"
    found = [key for key in model_registry.GetAllRegisteredClasses() if key.endswith(name)]
    assert len(found) == 1
    assert model_registry.GetParams(found[0], "Train").input.name == "Train"


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PLAIN_AT_LENGTH, params.DigitsPipelined, DigitsKeras])
def test_it_reads_digits_that_others_wrote_after_a_few_hundred_steps(cls):
    config = type(cls.__name__, (cls,), {"CHANNELS": (16, 32), "NUM_STEPS": 250})()
    training = Training(config.Task(), MESHES.get(cls, "layers:1"))
    losses = training.train(batches_of(config.Train()), config.NUM_STEPS)
    assert np.mean(losses[-10:]) < 0.3 < losses[0]
    means, counted = training.evaluate(batches_of(config.Test()))
    assert counted == 360
    assert means["accuracy"] >= 0.95, means


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PLAIN_AT_LENGTH, params.DigitsPipelined])
def test_evaluation_counts_each_digit_once_whatever_the_size_of_batches(cls):
    found = []
    for size in (48, 360):
        config = small(cls, BATCH_SIZE=size)
        training = Training(config.Task(), MESHES.get(cls, "layers:1"))
        found.append(training.evaluate(batches_of(config.Test())))
    (means, counted), (others, also) = found
    assert counted == also == 360
    assert means == pytest.approx(others, rel=1e-4)


@pytest.mark.slow
def test_evaluation_changes_nothing():
    config = small(params.DigitsPipelined)
    training = Training(config.Task(), "layers:2")
    # Before the first step, too, whose graph is then built after that of the evaluation.
    before = training.weights()
    training.evaluate(batches_of(config.Test()).take(2))
    assert_same_weights(training.weights(), before, rtol=0)
    training.train(batches_of(config.Train()), 2)
    before = training.weights()
    training.evaluate(batches_of(config.Test()).take(2))
    assert_same_weights(training.weights(), before, rtol=0)


def trained(cls, mesh, steps=4, **settings):
    config = small(cls, **settings)
    training = Training(config.Task(), mesh)
    losses = training.train(batches_of(config.Train()), steps)
    return losses, training.weights()


@pytest.mark.slow
def test_one_microbatch_is_the_plain_model():
    wanted, weights = trained(params.DigitsPlain, "layers:1")
    losses, pipelined = trained(params.DigitsPipelined, "layers:2", NUM_MICROBATCHES=1)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert_same_weights(pipelined, weights, rtol=1e-3, atol=1e-4)
    assert any("moving_mean" in name for name in weights)


@pytest.mark.slow
def test_in_a_pipeline_averages_are_those_of_the_whole_batch():
    """The first normalization is given the same by every cut of the batch."""
    _, wanted = trained(params.DigitsPlain, "layers:1", steps=1)
    _, got = trained(params.DigitsPipelined, "layers:2", steps=1, NUM_MICROBATCHES=4)
    for name in ("moving_mean", "moving_variance"):
        name = f"digits/cell_000/norm/{name}/var:0"
        assert np.abs(wanted[name] - (name.count("variance"))).max() > 1e-4
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_batch_normalization_that_assigns_trains_alike_in_the_plain_model():
    wanted = trained(params.DigitsPlain, "layers:1")
    assigning = bn_layers.BatchNormLayer.Params().Set(decay=0.9)
    losses, weights = trained(params.DigitsPlain, "layers:1", NORM=assigning)
    np.testing.assert_allclose(losses, wanted[0], rtol=1e-4)
    assert_same_weights(weights, wanted[1], rtol=1e-3, atol=1e-4)


def test_a_checkpoint_fits_with_and_without_a_pipeline():
    names = {
        cls: [v.name for v in Training(small(cls).Task(), mesh).task.vars.Flatten()]
        for cls, mesh in ((params.DigitsPlain, "layers:1"), (params.DigitsPipelined, "layers:2"))
    }
    plain, pipelined = names.values()
    assert sorted(plain) == sorted(pipelined)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PLAIN_AT_LENGTH, DigitsKeras])
def test_equal_seeds_train_alike(cls):
    (first, weights), (second, others) = (trained(cls, "layers:1") for _ in range(2))
    assert first == second
    assert_same_weights(weights, others, rtol=0)


def test_a_training_input_has_no_end_and_a_test_input_one_epoch():
    config = small(params.DigitsPlain)
    assert len(list(itertools.islice(batches_of(config.Train()), 200))) == 200
    batches = list(batches_of(config.Test()))
    assert len(batches) == -(-360 // 16)
    assert sum(float(tf.reduce_sum(batch.weights)) for batch in batches) == 360
