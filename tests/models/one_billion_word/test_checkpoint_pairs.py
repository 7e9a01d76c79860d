"""A checkpoint of every plan goes on under every other one, in either precision."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.checkpoint import Checkpoints, restore
from pipemesh.plan import Plan
from tests.models.one_billion_word.language_model import Training, random_batch, small

TENSOR = "heads:model;experts:model;vocab:model"
PLANS = {
    "plain": Plan(),
    "pipeline": Plan("layers:2", schedule="zb_h1", num_microbatches=2),
    "tensor": Plan("layers:1;model:2", "heads:model;expert_ff:model;vocab:model"),
    "data": Plan("layers:1;data:4", "batch:data;embed:data"),
    "mixed": Plan("model:2;layers:2;data:2", f"batch:data;{TENSOR}", num_microbatches=2),
    "experts": Plan("layers:1;e:4", "experts:e"),
}
# The gradients of round-off stay what they are.
CALM = {"NUM_EXPERTS": 4, "HIDDEN_DIM": 16, "LEARNING_RATE": 0.02, "DROPOUT_PROB": 0.1}
STEPS = 2
BATCHES = [random_batch(seed) for seed in range(STEPS + 1)]


@pytest.fixture(scope="module")
def eagerly():
    py_utils.SetEagerMode(True, test_mode=True)
    yield
    py_utils.SetEagerMode(False, test_mode=True)


@pytest.fixture(scope="module")
def trainings(eagerly):
    """A model for each plan, made when it is asked for."""
    made = {}

    def get(name, dtype):
        if (name, dtype) not in made:
            plan = PLANS[name]
            values = plan.to_values() | {"compute_dtype": dtype}
            made[name, dtype] = Training(
                small(**CALM, PLAN=Plan.from_values(values), PIPELINED=name != "plain")
            )
        return made[name, dtype]

    return get


@pytest.fixture(scope="module")
def saved(trainings, tmp_path_factory):
    """The checkpoint after some steps under a plan, and the loss of the next."""
    made = {}

    def get(name, dtype):
        if (name, dtype) not in made:
            training = trainings(name, dtype)
            for batch in BATCHES[:STEPS]:
                training.step(batch)
            folder = tmp_path_factory.mktemp("saved")
            path = Checkpoints(str(folder), training.state).save(STEPS, {})
            made[name, dtype] = path, training.step(BATCHES[STEPS])
        return made[name, dtype]

    return get


def tensors(path):
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def check(saved, trainings, tmp_path, there, here, rtol):
    path, expected = saved(*there)
    training = trainings(*here)
    assert restore(path, training.state) == []
    tmp_path.mkdir(exist_ok=True)
    again = Checkpoints(str(tmp_path), training.state).save(STEPS, {})
    mine, theirs = tensors(again), tensors(path)
    assert mine.keys() == theirs.keys()
    assert any(name.endswith("/Adam_1") for name in mine)
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)
    np.testing.assert_allclose(training.step(BATCHES[STEPS]), expected, rtol=rtol)


@pytest.mark.slow
def test_weights_and_optimizer_are_those_that_were_saved_and_so_is_the_next_loss(
    saved, trainings, tmp_path
):
    """From each plan to the next one."""
    for there, here in zip(PLANS, [*list(PLANS)[1:], "plain"], strict=True):
        check(saved, trainings, tmp_path / here, (there, ""), (here, ""), rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("there", "here"), list(itertools.product(PLANS, PLANS)))
def test_so_it_is_from_every_plan_to_every_one(saved, trainings, tmp_path, there, here):
    check(saved, trainings, tmp_path, (there, ""), (here, ""), rtol=1e-5)


@pytest.mark.parametrize(
    ("there", "here", "precisions"),
    [
        pytest.param("plain", "mixed", ("bfloat16", ""), marks=pytest.mark.slow),
        pytest.param("plain", "mixed", ("", "bfloat16"), marks=pytest.mark.exhaustive),
        pytest.param("mixed", "pipeline", ("bfloat16", ""), marks=pytest.mark.exhaustive),
        pytest.param("mixed", "pipeline", ("", "bfloat16"), marks=pytest.mark.exhaustive),
    ],
)
def test_precision_may_change(saved, trainings, tmp_path, there, here, precisions):
    """What stages compute in is the plan's; weights and the optimizer's state are float32."""
    check(saved, trainings, tmp_path, *zip((there, here), precisions, strict=True), rtol=2e-2)
