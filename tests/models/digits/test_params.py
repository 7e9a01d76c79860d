"""The registered classifiers of digits: they learn, and a pipeline changes nothing but speed."""

import itertools

import numpy as np
import pytest
from lingvo import model_registry
from lingvo.core import bn_layers

from models.digits import params
from models.digits.keras_model import DigitsKeras
from pipemesh.training import Options, RegisteredModel, Trainer


@pytest.fixture(autouse=True)
def lingvo_runs_eagerly(eagerly):
    """All of these train in TF2."""


def small(cls, **settings):
    settings = {"BATCH_SIZE": 16, "CHANNELS": (4, 8), **settings}
    return type(cls.__name__, (cls,), settings)()


def trainer(logdir, cls, dataset=None, **settings):
    model = RegisteredModel(small(cls, **settings), cls.__name__, dataset=dataset)
    return Trainer(model, Options(logdir=str(logdir), steps=1))


def train(made, steps):
    """The losses of some steps."""
    return [made.train_step()["loss"] for _ in range(steps)]


def weights_of(made):
    return {v.name: v.numpy() for v in made.trained.task.vars.Flatten()}


def trained(logdir, cls, steps=4, **settings):
    made = trainer(logdir, cls, dataset="none", **settings)
    return train(made, steps), weights_of(made)


def assert_same_weights(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], err_msg=name, **tolerance)


@pytest.mark.parametrize("cls", [params.DigitsPlain, params.DigitsPipelined, DigitsKeras])
def test_it_is_registered_with_lingvo(cls):
    name = f"{cls.__module__.removeprefix('models.')}.{cls.__name__}"
    found = [key for key in model_registry.GetAllRegisteredClasses() if key.endswith(name)]
    assert len(found) == 1
    assert model_registry.GetParams(found[0], "Train").input.name == "Train"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [params.DigitsPipelined, pytest.param(DigitsKeras, marks=pytest.mark.exhaustive)]
)
def test_it_reads_digits_that_others_wrote_after_a_few_hundred_steps(cls, tmp_path):
    made = trainer(tmp_path, cls, BATCH_SIZE=64, CHANNELS=(16, 32), NUM_STEPS=250)
    losses = []
    # Before the first step, too, whose graph is then built after that of the evaluation.
    for steps in (0, 250):
        losses += train(made, steps)
        before = weights_of(made)
        score = made.evaluate(made.whole)
        assert score.sums["loss"][1] == 360
        assert_same_weights(weights_of(made), before, rtol=0)
    assert np.mean(losses[-10:]) < 0.3 < losses[0]
    assert score.values()["accuracy"] >= 0.95, score


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_size_of_batches(tmp_path):
    made = [trainer(tmp_path, params.DigitsPipelined, BATCH_SIZE=size) for size in (48, 360)]
    one, other = (each.evaluate(each.whole).values() for each in made)
    assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_one_microbatch_is_the_plain_model(tmp_path):
    """And in any number averages of the first normalization, given the same, are of the batch."""
    plain = trainer(tmp_path, params.DigitsPlain, dataset="none")
    wanted, first = train(plain, 1), weights_of(plain)
    wanted += train(plain, 3)
    weights = weights_of(plain)
    losses, pipelined = trained(tmp_path, params.DigitsPipelined, NUM_MICROBATCHES=1)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert_same_weights(pipelined, weights, rtol=1e-3, atol=1e-4)
    assert any("moving_mean" in name for name in weights)
    # lingvo's usual normalization, which assigns, trains alike in the plain model.
    assigning = bn_layers.BatchNormLayer.Params().Set(decay=0.9)
    losses, others = trained(tmp_path, params.DigitsPlain, NORM=assigning)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert_same_weights(others, weights, rtol=1e-3, atol=1e-4)

    _, got = trained(tmp_path, params.DigitsPipelined, steps=1, NUM_MICROBATCHES=4)
    assert first.keys() == got.keys(), "a checkpoint fits with and without a pipeline"
    for name in ("moving_mean", "moving_variance"):
        name = f"digits/cell_000/norm/{name}/var:0"
        assert np.abs(first[name] - (name.count("variance"))).max() > 1e-4
        np.testing.assert_allclose(got[name], first[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_equal_seeds_train_alike(tmp_path):
    (first, weights), (second, others) = (trained(tmp_path, DigitsKeras) for _ in range(2))
    assert first == second
    assert_same_weights(weights, others, rtol=0)


def test_a_training_input_has_no_end_and_a_test_input_one_epoch():
    config = small(params.DigitsPlain)
    train_data, test_data = (
        made.Instantiate().datasource.GetDataset() for made in (config.Train(), config.Test())
    )
    assert len(list(itertools.islice(train_data, 200))) == 200
    batches = list(test_data)
    assert len(batches) == -(-360 // 16)
    assert sum(float(batch.weights.numpy().sum()) for batch in batches) == 360
