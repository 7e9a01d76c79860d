"""Training of some weights, or of adapters: alike under every plan, saved, and resumed."""

import functools
import itertools
import os
import re
import shutil

import numpy as np
import pytest

from models.pretrained import params, transfer
from pipemesh.checkpoint.reader import contents
from pipemesh.errors import CheckpointError, PipelineError, TrainingError
from pipemesh.layers.named.lora import ADAPTERS
from pipemesh.training.evaluation import restored
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


LORA = {"LORA_RANK": 3, "LORA_DROPOUT": 0.3, "LORA_TARGETS": "/w_"}


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


# By what is trained, the names of weights that move.
KINDS = {
    "top": (
        {"FREEZE": r"cell_00[01]/|norm/|w_q/var"},
        re.compile("cell_002/(?!.*norm|.*w_q/var)"),
    ),
    "adapters": (LORA, re.compile(ADAPTERS)),
}


@functools.cache
def plain(folder, kind):
    return trained(trainer(folder, {}, plain=True, changes=KINDS[kind][0]))


def cases():
    """Yields each plan with each kind; one of adapters runs by default."""
    for kind, plan in itertools.product(KINDS, PLANS):
        is_shown = kind == "adapters" and plan == "SIMD"
        marks = pytest.mark.slow if is_shown else pytest.mark.exhaustive
        yield pytest.param(kind, PLANS[plan], marks=marks, id=f"{kind}-{plan}")


@pytest.mark.parametrize(("kind", "plan"), [*cases()])
def test_only_some_weights_are_trained_alike_under_every_plan(folder, kind, plan):
    changes, moving = KINDS[kind]
    made = trainer(folder, plan, changes=changes)
    before = values_of(made)
    found = trained(made)
    assert_same(found, plain(folder, kind))
    weights = {name for name in before if name.endswith("/var")}
    moved = {name for name in weights if not np.array_equal(before[name], found[1][name])}
    assert moved == {name for name in weights if moving.search(name)}
    # Two moments of each, and two powers.
    assert sum("Adam" in name or "beta" in name for name in before) == 2 * len(moved) + 2


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


def test_patterns_find_the_same_weights_under_every_plan(folder):
    frozen = [trainer(folder, plan, freeze="w_q/var").trained.frozen() for plan in ({}, SPLIT)]
    assert sorted(frozen[0]) == sorted(frozen[1]) and len(frozen[0]) == 2
    # A flag takes the place of the attribute of its name, and nothing but a training looks at it.
    subject = model(folder, {}, {"FREEZE": "w_q/var"}, freeze="cel_001")
    assert subject.task().train.learner.bprop_variable_exclusion == "cel_001"
    restored(subject, str(folder / "ckpt-0"))


def copied(folder, to):
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to


# One adapter, whose graphs are soon made.
FEW = LORA | {"LORA_TARGETS": "cell_001/attention/w_q"}
PIPELINED = {"mesh": "layers:2", "num_microbatches": "2"}


def goes_on(run, plan, step):
    """Goes on from the checkpoint of a step."""
    return trainer(run, plan, changes=FEW, step=step, max_to_keep=1)


def saved(made):
    """Saves a checkpoint, as if the next step confirmed it."""
    made.begin_save()
    made.saving.confirm()
    made.saving.give_up()
    return made.saving.newest


def saved_next(made):
    """Saves a checkpoint, as if one step more had been trained."""
    made.trained.step.assign_add(1)
    return saved(made)


@pytest.mark.slow
def test_checkpoints_have_adapters_alone_and_resume_exactly(folder, tmp_path):
    run = copied(folder, tmp_path / "run")
    made = goes_on(run, PIPELINED, 0)
    trained(made, steps=1)
    saved(made)
    trained(made, steps=1)
    path, values = saved(made), values_of(made)
    whole = trained(made, steps=1)
    assert sorted(p.name for p in run.glob("ckpt-*.index")) == ["ckpt-0.index", "ckpt-2.index"]
    assert sum(name.endswith("/var") for name in contents(path)[0]) == 2
    # The same plan goes on bit by bit, another one to round-off.
    losses, after = trained(goes_on(run, PIPELINED, 2), steps=1)
    assert losses == whole[0]
    for name, value in whole[1].items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    other = trained(goes_on(run, PLANS["ZeRO"], 2), steps=1)
    assert_same(other, whole)
    # Evaluation takes base and adapters.
    subject = model(run, {}, plain=True, changes=FEW)
    for name, variable in restored(subject, path).state().items():
        np.testing.assert_array_equal(variable, values[name], err_msg=name)


@pytest.mark.slow
def test_float16_is_for_each_training_alone(folder, tmp_path):
    """The scale of its loss was missing in other checkpoints, and an adapter or a weight in its."""
    run, half = copied(folder, tmp_path), PIPELINED | {"compute_dtype": "float16"}
    restored(model(run, half), str(run / "ckpt-0"))
    restored(model(run, PIPELINED), saved_next(trainer(run, half)))
    for plan, other in ((PIPELINED, half), (half, PIPELINED)):
        path = saved_next(goes_on(run, plan, 1))
        assert any(name.endswith("/loss_scale/var") for name in contents(path)[0]) == (plan == half)
        restored(model(run, other, changes=FEW), path)


@pytest.mark.slow
def test_adapters_need_their_base(folder, tmp_path):
    with pytest.raises(TrainingError, match=r"but .* has none; begin with `pipemesh checkpoint"):
        trainer(copied(folder, tmp_path / "run"), {}, changes=LORA, step=None)
    saved_next(goes_on(tmp_path / "run", {}, 0))
    more = LORA | {"LORA_TARGETS": "cell_001/attention/w_[qv]"}
    for changes, has in ((more, "the model"), ({}, ".*/ckpt-1")):
        with pytest.raises(CheckpointError, match=f"^{has} has adapters that .* has not, such as"):
            trainer(tmp_path / "run", {}, 1, changes=changes)
    other = small.write(
        tmp_path / "b", small.RICH_LLAMA, small.tensors_of(small.RICH_LLAMA, seed=8)
    )
    transfer.import_weights(str(other), str(tmp_path / "other"))
    for file in (tmp_path / "run").glob("ckpt-1.*"):
        shutil.copy(file, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"for other weights than those of .*ckpt-0; put"):
        goes_on(tmp_path / "other", {}, 1)
    os.remove(tmp_path / "run" / "ckpt-0.index")
    with pytest.raises(CheckpointError, match="has adapters alone, for the weights of ckpt-0: "):
        goes_on(tmp_path / "run", {}, 1)


@pytest.mark.slow
def test_adapters_begin_on_a_trained_run_whose_damage_stays(folder, tmp_path):
    """The optimizer begins anew, and a damaged base is no damage of the adapters."""
    run = copied(folder, tmp_path)
    whole = trainer(run, {}, 0)
    trained(whole, steps=1)
    saved(whole)
    made, values = goes_on(run, {}, 1), values_of(whole)
    found = values_of(made)
    names = [name for name in made.trained.weights() if "_lora/" not in name]
    assert len(names) == 35 and made.step == 1
    for name in names:
        np.testing.assert_array_equal(found[name], values[name], err_msg=name)
    saved_next(made)
    assert goes_on(run, {}, 2).step == 2
    path = run / "ckpt-1.data-00000-of-00001"
    content = bytearray(path.read_bytes())
    # In each of the tensors.
    content[:] = bytes(byte ^ 1 for byte in content)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"ckpt-1\.data.* read .*; adapters need it, so put"):
        goes_on(run, {}, 2)
    assert not [*run.glob("damaged-*")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LORA_TARGETS": "table"}, "'table' find no weight that can have an adapter; there are a"),
        ({"LORA_TARGETS": "("}, r"targets '\(' are no regular expression"),
        ({"LORA_ALPHA": 0.0}, "alpha"),
        ({"train_only": "x"}, "adapters alone, but FREEZE is None and TRAIN_ONLY 'x'; leave these"),
        ({"FREEZE": "cell_001/"}, "adapters alone, but FREEZE is 'cell_001/'"),
        # They were ignored, and all weights trained.
        ({"LORA_RANK": 0, "LORA_TARGETS": "w"}, r"^--lora_.*=w.*: there are no adapters, since .*"),
    ],
)
def test_wrong_settings_of_adapters(folder, changes, message):
    options = {name: changes.pop(name) for name in ("train_only",) if name in changes}
    with pytest.raises((PipelineError, TrainingError), match=message):
        trainer(folder, {}, changes=LORA | changes, **options)
