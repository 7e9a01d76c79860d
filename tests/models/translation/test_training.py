"""A translator learns the same under every plan, resumes, and translates the same sentences."""

import json
import os
import sys

import numpy as np
import pytest

from models.translation import evaluate
from models.translation.spelling import LearnedSpelling
from pipemesh.errors import DataError, MissingPackageError
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run import Options
from pipemesh.training.trainer import Trainer
from tests.commands import program
from tests.models.one_billion_word.program import finish, open_process
from tests.models.translation.small import Small, write_pairs
from tests.warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("eagerly")]

MODEL = f"{Small.__module__}.Small"
LAYOUT = "heads:model;d_ff:model;vocab:model"
PLANS = {
    "plain": {},
    "layers:2;model:2": {
        **{"mesh": "layers:2;model:2", "layout": LAYOUT},
        **{"num_microbatches": "2", "schedule": "1f1b"},
    },
    "layers:3": {"mesh": "layers:3", "num_microbatches": "4", "schedule": "1f1b"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def trained(data, plan, logdir, until, restore=None):
    """The batches and losses of steps, and the checkpoint after the second."""
    config = Small()
    config.LOGDIR, config.TRAIN_DATA = str(logdir), f"{data}/train.tsv"
    model = RegisteredModel(config, MODEL, PLANS[plan], plain=plan == "plain")
    options = Options(logdir=str(logdir), steps=until)
    trainer = Trainer(model, options, restore=restore, keeps_place=restore is not None)
    steps, path = [], None
    while trainer.step < until:
        loss = trainer.train_step()["loss"]
        batch = {name: value.numpy().tolist() for name, value in trainer.batch.items()}
        steps.append((batch, loss))
        if trainer.step == 2:
            path = trainer.save()
    return steps, path


@pytest.mark.parametrize(
    "plan", ["layers:2;model:2", pytest.param("layers:3", marks=pytest.mark.exhaustive)]
)
def test_a_plan_goes_on_with_the_rows_and_losses_of_the_plain_model(data, plan, tmp_path):
    """Rows that the first training had read ahead are read again."""
    wanted, path = trained(data, "plain", tmp_path, 4)
    assert len({str(batch["source_ids"]) for batch, _ in wanted}) == 4
    steps, _ = trained(data, plan, tmp_path, 4, restore=path)
    for (batch, loss), (own, own_loss) in zip(wanted[2:], steps, strict=True):
        assert batch == own
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5)


FRONT = """
import sys
from models.translation import train
from pipemesh.commands import process
process.run(train.main, sys.argv)
"""


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The folder of a run of the front, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    words = [f"--model={MODEL}", f"--logdir={folder}", f"--train_data={data}/train.tsv"]
    words += [f"--heldout_data={data}/heldout.tsv", "--mesh_shape=layers:1"]
    words += ["--num_microbatches=1"]
    code, out, err = finish(open_process(warm("-c", FRONT, *words)))
    assert code == 0, err
    return folder, out


def test_the_front_prints_bleu_beside_that_of_copying(run):
    folder, out = run
    assert f"held-out translations of {folder}/ckpt-6: 12 pairs, greedy\n" in out
    assert out.count("\n    wanted: ") == 5
    told = out.splitlines()[-1]
    assert told.startswith("BLEU ") and ", copying the source " in told
    assert "|tok:13a|" in told and "version:" in told


DECODED = [("--plain",), ("--mesh_shape=layers:2;model:2", f"--layout={LAYOUT}")]


@pytest.mark.parametrize(
    "beams",
    [
        pytest.param((), marks=pytest.mark.exhaustive, id="greedy"),
        pytest.param(("--beams=4",), id="beams"),
    ],
)
def test_every_plan_translates_the_same(data, run, beams):
    (data / "texts.txt").write_text("the file\nopen a page\nit is\n")
    words = [f"--logdir={run[0]}", f"--file={data}/texts.txt", "--format=json", "--max_tokens=5"]
    found = []
    for plan in DECODED:
        out = program.done("decode", *words, *beams, *plan)
        found.append([json.loads(line) for line in out.splitlines()])
    assert [each["prompt"] for each in found[0]] == ["the file", "open a page", "it is"]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one["tokens"] == two["tokens"] and one["text"] == two["text"]
            np.testing.assert_allclose(one["log_probs"], two["log_probs"], atol=1e-4)


def test_what_a_translator_cannot_do_is_an_error(run, tmp_path, monkeypatch):
    folder, _ = run
    config = Small()
    config.TRAIN_DATA = "a.tsv"
    with pytest.raises(DataError, match="there is no held-out data; train with --heldout_data"):
        evaluate.heldout_pairs(config)
    line = program.refused("score", f"--logdir={folder}", "--prompt=the")
    assert "score is for models that continue texts, and the checkpoint is of a transl" in line
    with pytest.raises(DataError, match=r"has 290 pieces, but the model has 300 tokens; set --vo"):
        LearnedSpelling(str(folder), 300, "a.tsv")()
    os.rename(folder / "tokenizer.model", tmp_path / "tokenizer.model")
    try:
        with pytest.raises(DataError, match=r"has checkpoints, but no tokenizer\.model, which"):
            LearnedSpelling(str(folder), 290, "a.tsv")()
    finally:
        os.rename(tmp_path / "tokenizer.model", folder / "tokenizer.model")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(MissingPackageError, match="BLEU needs sacrebleu, which is not installed"):
        evaluate.report(str(folder / "ckpt-6"), 5)
