"""Layers with named dims train alike under every plan, and go on from each other's checkpoints."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.plan import Plan
from tests.models.one_billion_word.small_training import begun, scalars, small_request

STEPS = 10
# A step size at which round-off stays round-off.
CALM = {
    "LAYERS": "named",
    "NUM_LAYERS": 2,
    "NUM_HEADS": 4,
    "LEARNING_RATE": 0.02,
    "DROPOUT_PROB": 0.2,
}
LAYOUT = "batch:data;heads:model;d_ff:model;vocab:model"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tmp_path_factory.mktemp("plain")


@pytest.fixture
def plain_losses(plain, folder, train):
    """Trained once; what follows finds it finished."""
    if not (plain / f"ckpt-{STEPS}.index").exists():
        settings = {**CALM, "PIPELINED": False}
        request = small_request(plain, folder, steps=STEPS, save_every=5, plan=Plan(), **settings)
        assert train(request) == 0
    return scalars(plain, "loss")


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return tmp_path_factory.mktemp("split")


@pytest.fixture
def split_losses(split, folder, train):
    """Trained once, as `plain_losses`: the whole program; other plans are tried by their steps."""
    if not (split / f"ckpt-{STEPS}.index").exists():
        plan = Plan("layers:2;data:2;model:2", LAYOUT, "zb_v", 4)
        settings = {**CALM, "STRICT_DEVICES": True}
        request = small_request(split, folder, steps=STEPS, save_every=4, plan=plan, **settings)
        assert train(request) == 0
    return scalars(split, "loss")


@pytest.mark.slow
def test_losses_are_those_of_the_plain_model(plain_losses, split_losses):
    np.testing.assert_allclose(split_losses, plain_losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("split_losses")
def test_a_checkpoint_goes_on_under_another_split(
    train, folder, tmp_path, split, plain, plain_losses
):
    logdir = begun(split, 4, tmp_path / "run")
    for steps, plan in (
        (7, Plan("layers:2;data:4", "batch:data;embed:data", num_microbatches=2)),
        (STEPS, Plan("layers:3;model:1,2,1", "heads:model;d_ff:model", num_microbatches=2)),
    ):
        request = small_request(logdir, folder, steps=steps, save_every=3, plan=plan, **CALM)
        assert train(request) == 0
    np.testing.assert_allclose(scalars(logdir, "loss"), plain_losses[4:], rtol=1e-5)
    # A checkpoint knows whole weights, and the state of the optimizer for each.
    mine, other = (tf.train.load_checkpoint(str(p / f"ckpt-{STEPS}")) for p in (logdir, plain))
    shapes = [
        {k: v for k, v in r.get_variable_to_shape_map().items() if not k.startswith("data/")}
        for r in (mine, other)
    ]
    assert shapes[0] == shapes[1]
    assert not any("slice" in name for name in shapes[0])
    for name in shapes[0]:
        # A bias of all keys changes no attention: its gradient is round-off, which Adam scales up.
        if "var/.ATTR" in name and ".Sb_k." not in name:
            np.testing.assert_allclose(
                mine.get_tensor(name), other.get_tensor(name), rtol=1e-3, atol=1e-5, err_msg=name
            )
