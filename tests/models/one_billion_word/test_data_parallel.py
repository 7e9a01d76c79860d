"""Replicas of stages train as the plain model does: dropout on, under every schedule."""

import numpy as np
import pytest

from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    scalars,
    small_request,
    weights,
)

STEPS = 20
# A step size at which round-off stays round-off for 20 steps.
CALM = {"NUM_LAYERS": 4, "LEARNING_RATE": 0.02, "DROPOUT_PROB": 0.2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, folder):
    return tmp_path_factory.mktemp("plain")


@pytest.fixture
def plain_losses(plain, folder, train):
    """Trained once; what follows finds it finished."""
    if not (plain / f"ckpt-{STEPS}.index").exists():
        settings = {**CALM, "PIPELINED": False, "NUM_MICRO_BATCHES": 1}
        request = small_request(plain, folder, steps=STEPS, save_every=5, **settings)
        assert train(request) == 0
    return scalars(plain, "loss")


@pytest.mark.parametrize(
    ("schedule", "mesh_shape", "num_stages", "num_microbatches"),
    [
        ("gpipe", "layers:2;data:2", 2, 2),
        ("1f1b", "layers:2;data:2", 2, 4),
        ("interleaved:2", "layers:2;data:2", 4, 4),
        ("zb_h1", "layers:2;data:2", 2, 4),
        ("zb_v", "layers:2;data:2", 4, 4),
        ("1f1b", "data:2;layers:3", 3, 4),
        ("zb_h1", "layers:1;data:4", 1, 2),
    ],
)
@pytest.mark.slow
def test_losses_are_those_of_the_plain_model(
    plain_losses, train, folder, tmp_path, schedule, mesh_shape, num_stages, num_microbatches
):
    request = small_request(
        tmp_path,
        folder,
        steps=STEPS,
        save_every=STEPS,
        mesh_shape=mesh_shape,
        layout="batch:data",
        SCHEDULE=schedule,
        NUM_STAGES=num_stages,
        **{**CALM, "NUM_MICRO_BATCHES": num_microbatches, "STRICT_DEVICES": True},
    )
    assert train(request) == 0
    np.testing.assert_allclose(scalars(tmp_path, "loss"), plain_losses, rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_three_stages_goes_on_with_replicas_of_two(train, folder, tmp_path):
    settings = {**CALM, "NUM_MICRO_BATCHES": 4}
    whole = tmp_path / "whole"
    three = {"mesh_shape": "layers:3", "NUM_STAGES": 3, "save_every": 5}
    assert train(small_request(whole, folder, steps=10, **three, **settings)) == 0
    logdir = tmp_path / "run"
    assert train(small_request(logdir, folder, steps=5, **three, **settings)) == 0
    assert_same_weights(weights(logdir, 5), weights(whole, 5))
    two = {"mesh_shape": "layers:2;data:2", "layout": "batch:data", "NUM_STAGES": 2}
    assert train(small_request(logdir, folder, steps=10, **two, **settings)) == 0
    np.testing.assert_allclose(scalars(logdir, "loss"), scalars(whole, "loss"), rtol=1e-5)
