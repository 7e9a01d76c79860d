"""Every optimizer trains alike under every layout, and goes on from checkpoints of another."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from models.one_billion_word import params
from models.one_billion_word.sizes import OPTIMIZERS
from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan
from tests.models.one_billion_word.small_training import begun, scalars, small_request

STEPS = 8
CALM = {
    "LAYERS": "named",
    "NUM_LAYERS": 1,
    "NUM_HEADS": 4,
    "DROPOUT_PROB": 0.2,
    # So small that it clips in each step.
    "CLIP_GRADIENT_NORM": 0.2,
}
# At which round-off stays round-off.
RATES = {"adam": 0.02, "adafactor": 0.2, "sgd": 8.0, "momentum": 2.0}
SPLIT = Plan("layers:2;model:2", "heads:model;d_ff:model;vocab:model", "1f1b", 2)


@pytest.fixture(autouse=True)
def small_dims_are_factored(monkeypatch):
    original = params.optimizer_of

    def optimizer_of(config):
        chosen = original(config)
        if config.OPTIMIZER == "adafactor":
            chosen.min_dim_size_to_factor = 4
        return chosen

    monkeypatch.setattr(params, "optimizer_of", optimizer_of)


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    return functools.cache(tmp_path_factory.mktemp)


@pytest.fixture
def trained(log_folder, folder, train):
    """Trains with an optimizer and without a pipeline or split, once for each."""

    def trained(optimizer, how):
        logdir = log_folder(f"{optimizer}-{how}")
        if not (logdir / f"ckpt-{STEPS}.index").exists():
            plan, settings = {
                "plain": (Plan(), {"PIPELINED": False}),
                "split": (SPLIT, {"STRICT_DEVICES": True}),
            }[how]
            assert train(request(logdir, folder, optimizer, plan, save_every=3, **settings)) == 0
        return logdir

    return trained


def request(logdir, folder, optimizer, plan, **changes):
    settings = {**CALM, "OPTIMIZER": optimizer, "LEARNING_RATE": RATES[optimizer]}
    settings |= {"steps": STEPS, "save_every": STEPS, "plan": plan}
    return small_request(logdir, folder, **settings | changes)


# By default the one that is least like the one that all other tests train with.
BY_DEFAULT = ("adafactor",)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.exhaustive)
        for name in OPTIMIZERS
    ],
)
@pytest.mark.slow
def test_losses_are_those_of_the_plain_model(trained, optimizer):
    losses = scalars(trained(optimizer, "plain"), "loss")
    np.testing.assert_allclose(scalars(trained(optimizer, "split"), "loss"), losses, rtol=1e-5)
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.slow
def test_adafactor_goes_on_under_another_split(trained, train, folder, tmp_path):
    plain = trained("adafactor", "plain")
    logdir = begun(trained("adafactor", "split"), 3, tmp_path / "run")
    # The middle stage has more devices than the others.
    plan = Plan("layers:3;model:1,2,1", "heads:model;d_ff:model", num_microbatches=2)
    assert train(request(logdir, folder, "adafactor", plan)) == 0
    np.testing.assert_allclose(scalars(logdir, "loss"), scalars(plain, "loss")[3:], rtol=1e-5)
    mine, other = (tf.train.load_checkpoint(str(p / f"ckpt-{STEPS}")) for p in (logdir, plain))
    shapes, wanted = (
        {k: v for k, v in r.get_variable_to_shape_map().items() if not k.startswith("data/")}
        for r in (mine, other)
    )
    assert shapes == wanted
    assert not any("slice" in name for name in shapes)


@pytest.mark.slow
def test_another_optimizer_than_the_checkpoints_is_refused(trained, train, folder, tmp_path):
    logdir = begun(trained("adafactor", "plain"), 6, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another model \(optimizer adafactor -> momentum"):
        train(request(logdir, folder, "momentum", Plan(num_microbatches=2)))
