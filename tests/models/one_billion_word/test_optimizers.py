"""Optimizers and moving averages do not depend on the layout, nor do their checkpoints."""

import numpy as np
import pytest

from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan
from pipemesh.training import learning
from pipemesh.training.learning import OPTIMIZERS
from tests.models.one_billion_word.language_model import losses, random_batch, small
from tests.models.one_billion_word.small_training import begun, scalars, small_request, weights

STEPS, DECAY = 6, 0.6
CALM = {
    "LAYERS": "named",
    "NUM_LAYERS": 1,
    "NUM_HEADS": 4,
    "DROPOUT_PROB": 0.2,
    "TIED_EMBEDDINGS": True,
    "EMA_DECAY": DECAY,
    # So small that it clips in each step.
    "CLIP_GRADIENT_NORM": 0.2,
}
# At which round-off stays round-off.
RATES = {
    **{"adam": 0.02, "adamw": 0.02, "muon": 0.02},
    **{"adafactor": 0.2, "sgd": 8.0, "momentum": 2.0},
}
SPLIT = Plan("layers:2;model:2", "heads:model;d_ff:model;vocab:model", "1f1b", 2)
HOW = {
    "plain": {"plan": Plan(), "PIPELINED": False},
    "split": {"plan": SPLIT, "STRICT_DEVICES": True},
}
AVERAGE = "/ExponentialMovingAverage"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_dims_are_factored(monkeypatch):
    original = learning.optimizer_params

    def optimizer_params(name):
        chosen = original(name)
        if name == "adafactor":
            chosen.min_dim_size_to_factor = 4
        return chosen

    monkeypatch.setattr(learning, "optimizer_params", optimizer_params)


def request(logdir, folder, optimizer="adafactor", how="plain", **changes):
    settings = {**CALM, "OPTIMIZER": optimizer, "LEARNING_RATE": RATES[optimizer], **HOW[how]}
    settings |= {"steps": STEPS, "save_every": 1, "max_to_keep": STEPS}
    return small_request(logdir, folder, **settings | changes)


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture
def trained(log_folder, folder, train):
    """Trains with an optimizer and without a pipeline or split, once for each."""

    def trained(optimizer, how):
        logdir = log_folder / f"{optimizer}-{how}"
        if not (logdir / f"ckpt-{STEPS}.index").exists():
            assert train(request(logdir, folder, optimizer, how)) == 0
        return logdir

    return trained


# By default the one that is least like what all other tests train with.
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name == "adafactor" else pytest.mark.exhaustive)
        for name in OPTIMIZERS
    ],
)
def test_losses_and_averages_are_those_of_the_plain_model(trained, optimizer):
    plain, split = (trained(optimizer, how) for how in HOW)
    before = scalars(plain, "loss")
    np.testing.assert_allclose(scalars(split, "loss"), before, rtol=1e-5)
    assert before[-1] < before[0] - 0.01
    norms = scalars(plain, "gradient_norm")
    np.testing.assert_allclose(scalars(split, "gradient_norm"), norms, rtol=1e-4)
    assert min(norms) > CALM["CLIP_GRADIENT_NORM"], "it is that before clipping"
    judged = [scalars(logdir, "loss", "heldout") for logdir in (split, plain)]
    np.testing.assert_allclose(*judged, rtol=1e-5)
    found, wanted = (weights(logdir, STEPS) for logdir in (split, plain))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # The gradient of the keys' bias is nothing but round-off, and Adam takes full steps.
        if name.endswith(AVERAGE) and "/b_k/" not in name:
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_averages_are_what_lingvo_says_and_are_judged(trained, train, folder, tmp_path):
    """average = decay * average + (1 - decay) * weight, with a decay that rises to what is asked.

    TensorFlow's ExponentialMovingAverage with num_updates: min(decay, (1 + step) / (10 + step)).
    """
    logdir = trained("adafactor", "plain")
    saved = [weights(logdir, step) for step in range(1, STEPS + 1)]
    for name in [name for name in saved[0] if name.endswith("/var")]:
        averages = [step[name + AVERAGE] for step in saved]
        for step in range(1, STEPS):
            decay = min(DECAY, (1 + step) / (10 + step))
            wanted = decay * averages[step - 1] + (1 - decay) * saved[step][name]
            np.testing.assert_allclose(averages[step], wanted, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(averages[-1], saved[-1][name]), name
    # The same training, judged by other weights.
    assert train(request(tmp_path, folder, EMA_DECAY=0.0)) == 0
    assert scalars(tmp_path, "loss") == scalars(logdir, "loss")
    assert scalars(tmp_path, "loss", "heldout") != scalars(logdir, "loss", "heldout")


# The middle stage has more devices than the others; replicas hold slices (stage 3 of ZeRO).
OTHERS = {
    "adafactor": Plan("layers:3;model:1,2,1", "heads:model;d_ff:model", num_microbatches=2),
    "muon": Plan("layers:2;data:2", "batch:data;embed:data", num_microbatches=2),
}


@pytest.mark.parametrize(
    "optimizer", ["adafactor", pytest.param("muon", marks=pytest.mark.exhaustive)]
)
def test_it_goes_on_under_another_split(trained, train, folder, tmp_path, optimizer):
    plain = trained(optimizer, "plain")
    logdir = begun(trained(optimizer, "split"), 3, tmp_path / "run")
    assert train(request(logdir, folder, optimizer, "split", plan=OTHERS[optimizer])) == 0
    np.testing.assert_allclose(scalars(logdir, "loss"), scalars(plain, "loss")[3:], rtol=1e-5)
    found, wanted = (weights(path, STEPS) for path in (logdir, plain))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in wanted.items()}
    assert not any("slice" in name for name in found)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "plans"),
    [
        (
            {},
            [
                Plan(
                    *("layers:2;model:2", "heads:model;d_ff:model", "gpipe", 2),
                    remat="full",
                    lowering="simd",
                ),
                Plan("layers:2;data:2", "batch:data;embed:data", "zb_h1", 2),
            ],
        ),
        (
            {"NUM_EXPERTS": 2},
            [
                Plan("layers:2;data:2", "batch:data;experts:data", "1f1b", 2),
                Plan("layers:2;model:2", "heads:model;expert_ff:model", "1f1b", 2),
            ],
        ),
    ],
)
def test_muon_is_the_same_as_one_program_and_with_experts(settings, plans):
    how = {"OPTIMIZER": "muon", "LEARNING_RATE": 0.5, "DROPOUT_PROB": 0.2, **settings}
    batches = [random_batch(number) for number in range(3)]
    wanted = losses(small(PLAN=Plan(), PIPELINED=False, **how), batches)
    for plan in plans:
        found = losses(small(PLAN=plan, **how), batches)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": "momentum"}, r"another model \(optimizer adafactor -> momentum"),
        ({"EMA_DECAY": 0.0}, "moving_averages some -> none"),
    ],
)
def test_another_optimizer_than_the_checkpoints_is_refused(
    trained, train, folder, tmp_path, changes, told
):
    logdir = begun(trained("adafactor", "plain"), STEPS, tmp_path / "run")
    with pytest.raises(CheckpointError, match=told):
        train(request(logdir, folder, **changes))
