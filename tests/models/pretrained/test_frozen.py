"""Training of some weights: pipelined and split as in the plain model, with dropout on."""

import functools

import numpy as np
import pytest

from models.pretrained import params, transfer
from pipemesh.errors import TrainingError
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.models.pretrained import small
from tests.models.pretrained.test_peers import OneBatch

pytestmark = pytest.mark.usefixtures("eagerly")

RULES = "heads:model;kv_heads:model;d_ff:model;vocab:model"
SPLIT = {"mesh": "layers:2;model:2", "layout": RULES, "num_microbatches": "2"}
PLANS = {
    "split": {**SPLIT, "schedule": "1f1b"},
    "halves, tokens split": {**SPLIT, "schedule": "zb_h1", "layout": f"{RULES};length:model"},
    "ZeRO": {
        "mesh": "layers:2;data:2",
        "layout": "batch:data;embed:data",
        "num_microbatches": "2",
        "remat": "none",
    },
    "SIMD": {**SPLIT, "schedule": "gpipe", "lowering": "simd"},
}


class Llama(OneBatch, params.Llama):
    OPTIMIZER, LEARNING_RATE, CLIP_GRADIENT_NORM, DROPOUT_PROB = "adam", 0.01, 1.0, 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A training that begins with random weights of another program."""
    path = tmp_path_factory.mktemp("base")
    tensors = small.tensors_of(small.RICH_LLAMA)
    transfer.import_weights(str(small.write(path / "theirs", small.RICH_LLAMA, tensors)), str(path))
    return path


def model(folder, plan, changes=(), **options):
    config = Llama()
    for name, value in {"LOGDIR": str(folder), **dict(changes)}.items():
        setattr(config, name, value)
    return RegisteredModel(config, "Model", plan, **options)


def trainer(folder, plan, step=0, max_to_keep=3, **options):
    """Goes on from the checkpoint of a step."""
    run = Options(logdir=str(folder), steps=9, max_to_keep=max_to_keep)
    path = None if step is None else str(folder / f"ckpt-{step}")
    return Trainer(model(folder, plan, **options), run, path)


def values_of(made):
    """Returns all whole variables of a training by name."""
    values = {}
    for name, variable in made.trained.state().items():
        if not hasattr(variable, "parts"):
            values[name] = variable.numpy()
            continue
        values[name] = np.zeros(variable.parts[0][1].whole, np.float32)
        for part, cut in variable.parts:
            at = (slice(b, b + n) for b, n in zip(cut.begin, part.shape, strict=True))
            values[name][tuple(at)] = part.numpy()
    return values


def trained(made, steps=2):
    """Returns the losses of some steps, and all variables after them."""
    losses = [made.train_step()["loss"] for _ in range(steps)]
    return losses, values_of(made)


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-3, atol=2e-5, err_msg=name)


FREEZE = r"cell_00[01]/|norm/"


@functools.cache
def plain(folder):
    return trained(trainer(folder, {}, plain=True, freeze=FREEZE))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_frozen_weights_stay_under_every_plan(folder, plan):
    made = trainer(folder, plan, freeze=FREEZE)
    before = values_of(made)
    found = trained(made)
    assert_same(found, plain(folder))
    weights = {name for name in before if "/var" in name and "Adam" not in name}
    moved = {n for n in weights if not np.array_equal(before[n], found[1][n])}
    assert moved == {n for n in weights if "cell_002/" in n and "norm" not in n}
    assert not [n for n in before if "Adam" in n and "cell_001" in n]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": "cel_001"}, "'cel_001' finds none of the 34 weights, such as 'language"),
        ({"freeze": "cell"}, "leave no weight to be trained"),
        ({"train_only": "("}, r"'\(' is no regular expression"),
    ],
)
def test_patterns_must_leave_weights_to_train(folder, options, message):
    with pytest.raises(TrainingError, match=message):
        trainer(folder, {}, **options)
