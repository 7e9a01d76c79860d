"""Adapters: trained as in the plain model under every plan, saved alone, and as `peft` does."""

import functools
import os
import shutil

import numpy as np
import pytest

from models.pretrained import transfer
from pipemesh.checkpoint.reader import contents
from pipemesh.errors import CheckpointError, PipelineError, TrainingError
from pipemesh.layers.named.lora import ADAPTERS
from pipemesh.training.evaluation import restored
from tests.models.pretrained import small
from tests.models.pretrained.test_frozen import (
    PLANS,
    assert_same,
    folder,  # noqa: F401
    model,
    trained,
    trainer,
    values_of,
)

pytestmark = pytest.mark.usefixtures("eagerly")

LORA = {"LORA_RANK": 3, "LORA_DROPOUT": 0.3, "LORA_TARGETS": "/w_"}


@functools.cache
def plain(folder):
    return trained(trainer(folder, {}, plain=True, changes=LORA))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_adapters_are_trained_alike_under_every_plan(folder, plan):  # noqa: F811
    made = trainer(folder, plan, changes=LORA)
    before = values_of(made)
    found = trained(made)
    assert_same(found, plain(folder))
    weights = {name for name in before if "/var" in name and "Adam" not in name}
    moved = {name for name in weights if not np.array_equal(before[name], found[1][name])}
    assert moved == {name for name in weights if ADAPTERS in name}
    assert len(moved) == 2 * 2 * 7
    assert len([name for name in before if "Adam" in name and "_lora/" not in name]) <= 2


def copied(folder, to):  # noqa: F811
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


def goes_on(run, plan, step):
    """Goes on from the checkpoint of a step."""
    return trainer(run, plan, changes=LORA, step=step, max_to_keep=1)


def test_checkpoints_have_adapters_alone_and_resume_exactly(folder, tmp_path):  # noqa: F811
    run = copied(folder, tmp_path / "run")
    whole = trained(trainer(folder, PLANS["split"], changes=LORA), steps=3)
    trained(made := goes_on(run, PLANS["split"], 0), steps=1)
    made.save()
    trained(made, steps=1)
    path = made.save()
    assert sorted(p.name for p in run.glob("ckpt-*.index")) == ["ckpt-0.index", "ckpt-2.index"]
    names = contents(path)[0]
    assert not [n for n in names if n.endswith("/var") and ADAPTERS not in n]
    # The same plan goes on bit by bit, another one to round-off.
    losses, values = trained(goes_on(run, PLANS["split"], 2), steps=1)
    assert losses == whole[0][2:]
    for name, value in whole[1].items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
    other = trained(goes_on(run, PLANS["ZeRO"], 2), steps=1)
    assert_same(other, (whole[0][2:], whole[1]))
    # Evaluation takes base and adapters.
    subject = model(run, {}, plain=True, changes=LORA)
    found = restored(subject, path).state()
    name = next(n for n in found if "w_q/var" in n)
    np.testing.assert_array_equal(found[name], values_of(made)[name])


def test_adapters_need_their_base(folder, tmp_path):  # noqa: F811
    with pytest.raises(TrainingError, match="but .* has none; begin with `pipemesh checkpoint"):
        trainer(copied(folder, tmp_path / "run"), {}, changes=LORA, step=None)
    made = goes_on(tmp_path / "run", {}, 0)
    trained(made, steps=1)
    made.save()
    other = small.write(tmp_path / "b", small.RICH_LLAMA, small.tensors_of(small.RICH_LLAMA, seed=8))
    transfer.import_weights(str(other), str(tmp_path / "other"))
    for file in (tmp_path / "run").glob("ckpt-1.*"):
        shutil.copy(file, tmp_path / "other")
    with pytest.raises(CheckpointError, match="for other weights than those of .*ckpt-0; put"):
        goes_on(tmp_path / "other", {}, 1)
    os.remove(tmp_path / "run" / "ckpt-0.index")
    with pytest.raises(CheckpointError, match="has adapters alone, for the weights of ckpt-0: "):
        goes_on(tmp_path / "run", {}, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LORA_TARGETS": "table"}, "'table' find no weight that can have an adapter; there are a"),
        ({"LORA_TARGETS": "("}, r"targets '\(' are no regular expression"),
        ({"LORA_ALPHA": 0.0}, "alpha"),
        ({"TRAIN_ONLY": "x", "train_only": "x"}, "has bprop_variable_filter '_lora/' already"),
    ],
)
def test_wrong_settings_of_adapters(folder, changes, message):  # noqa: F811
    options = {name: changes.pop(name) for name in ("train_only",) if name in changes}
    with pytest.raises((PipelineError, TrainingError), match=message):
        trainer(folder, {}, changes=LORA | changes, **options)
