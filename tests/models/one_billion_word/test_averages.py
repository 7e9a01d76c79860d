"""Moving averages of weights: kept, saved, and judged in place of the weights."""

import numpy as np
import pytest

from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan
from tests.models.one_billion_word.small_training import (
    begun,
    scalars,
    small_request,
    weights,
)

CALM = {"NUM_LAYERS": 1, "NUM_HEADS": 4, "LEARNING_RATE": 0.05, "LAYERS": "named"}
STEPS, DECAY = 6, 0.6


def request(logdir, folder, **changes):
    settings = {"steps": STEPS, "save_every": 1, "max_to_keep": STEPS, "EMA_DECAY": DECAY}
    return small_request(logdir, folder, **{**CALM, **settings, **changes})


def plain(logdir, folder, **changes):
    return request(logdir, folder, plan=Plan(), PIPELINED=False, **changes)


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("averages")


@pytest.fixture
def averaged(log_folder, train, folder):
    """Trained once, with each step's checkpoint."""
    if not (log_folder / f"ckpt-{STEPS}.index").exists():
        assert train(plain(log_folder, folder)) == 0
    return log_folder


@pytest.mark.slow
def test_they_are_what_lingvo_says_and_are_judged(train, folder, averaged, tmp_path):
    """average = decay * average + (1 - decay) * weight, with a decay that rises to what is asked.

    TensorFlow's ExponentialMovingAverage with num_updates: min(decay, (1 + step) / (10 + step)).
    """
    names = [name for name in weights(averaged, 1) if name.endswith("/var")]
    saved = [weights(averaged, step) for step in range(1, STEPS + 1)]
    for name in names:
        averages = [step[f"{name}/ExponentialMovingAverage"] for step in saved]
        for step in range(1, STEPS):
            decay = min(DECAY, (1 + step) / (10 + step))
            wanted = decay * averages[step - 1] + (1 - decay) * saved[step][name]
            np.testing.assert_allclose(averages[step], wanted, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(averages[-1], saved[-1][name]), name
    without = tmp_path / "without"
    assert train(plain(without, folder, EMA_DECAY=0.0)) == 0
    # The same training, judged by other weights.
    assert scalars(without, "loss") == scalars(averaged, "loss")
    assert scalars(without, "loss", "heldout") != scalars(averaged, "loss", "heldout")


@pytest.mark.slow
def test_they_do_not_depend_on_the_plan(train, folder, tmp_path):
    """Of slices of tied weights."""
    one, other = tmp_path / "one", tmp_path / "other"
    assert train(plain(one, folder, TIED_EMBEDDINGS=True)) == 0
    rules = "heads:model;d_ff:model;vocab:model"
    plan = Plan("layers:2;model:2", rules, "1f1b", num_microbatches=2)
    assert train(request(other, folder, plan=plan, TIED_EMBEDDINGS=True)) == 0
    wanted, found = weights(one, STEPS), weights(other, STEPS)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        # The gradient of the keys' bias is nothing but round-off, and Adam takes full steps.
        if name.endswith("ExponentialMovingAverage") and "/b_k/" not in name:
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    judged = [scalars(folder, "loss", "heldout") for folder in (one, other)]
    np.testing.assert_allclose(*judged, rtol=1e-5)


@pytest.mark.slow
def test_a_training_with_them_is_not_gone_on_with_without(train, folder, averaged, tmp_path):
    begun(averaged, 1, tmp_path / "run")
    with pytest.raises(CheckpointError, match="moving_averages some -> none"):
        train(plain(tmp_path / "run", folder, EMA_DECAY=0.0))
