"""Replicas of stages train as the plain model does: dropout on, under every schedule."""

import numpy as np
import pytest

from pipemesh.plan import Plan
from tests.models.one_billion_word.small_training import begun, scalars, small_request

STEPS = 20
# A step size at which round-off stays round-off for 20 steps.
CALM = {"NUM_LAYERS": 2, "LEARNING_RATE": 0.02, "DROPOUT_PROB": 0.2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, folder):
    return tmp_path_factory.mktemp("plain")


@pytest.fixture
def plain_losses(plain, folder, train):
    """Trained once; what follows finds it finished."""
    if not (plain / f"ckpt-{STEPS}.index").exists():
        settings = {**CALM, "PIPELINED": False}
        request = small_request(plain, folder, steps=STEPS, save_every=5, plan=Plan(), **settings)
        assert train(request) == 0
    return scalars(plain, "loss")


# All of these tables run with replicas in the tests of stages, and plans of all kinds by their
# steps alone; by default here: the one with most kinds of actions and two stages a device.
@pytest.mark.parametrize(
    ("schedule", "mesh", "num_microbatches"),
    [
        pytest.param("gpipe", "layers:2;data:2", 2, marks=pytest.mark.exhaustive),
        pytest.param("1f1b", "layers:2;data:2", 4, marks=pytest.mark.exhaustive),
        pytest.param("interleaved:2", "layers:2;data:2", 4, marks=pytest.mark.exhaustive),
        pytest.param("zb_h1", "layers:2;data:2", 4, marks=pytest.mark.exhaustive),
        ("zb_v", "layers:2;data:2", 4),
        pytest.param("1f1b", "data:2;layers:3", 4, marks=pytest.mark.exhaustive),
        pytest.param("zb_h1", "layers:1;data:4", 2, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_losses_are_those_of_the_plain_model(
    plain_losses, train, folder, tmp_path, schedule, mesh, num_microbatches
):
    plan = Plan(mesh, "batch:data", schedule, num_microbatches)
    settings = {**CALM, "STRICT_DEVICES": True}
    request = small_request(tmp_path, folder, steps=STEPS, save_every=STEPS, plan=plan, **settings)
    assert train(request) == 0
    np.testing.assert_allclose(scalars(tmp_path, "loss"), plain_losses, rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_three_stages_goes_on_with_replicas_of_two(train, folder, tmp_path, capsys):
    whole = tmp_path / "whole"
    three = {"plan": Plan("layers:3", num_microbatches=4), "save_every": 5, **CALM}
    assert train(small_request(whole, folder, steps=10, **three)) == 0
    logdir = begun(whole, 5, tmp_path / "run")
    two = Plan("layers:2;data:2", "batch:data", num_microbatches=4)
    capsys.readouterr()
    assert train(small_request(logdir, folder, steps=10, plan=two, **CALM)) == 0
    out = capsys.readouterr().out
    assert f"plan: {two}\n" in out
    assert (
        "changed since the checkpoint: mesh layers:3 -> layers:2;data:2, "
        "layout none -> batch:data\n"
    ) in out
    np.testing.assert_allclose(scalars(logdir, "loss"), scalars(whole, "loss")[5:], rtol=1e-5)
