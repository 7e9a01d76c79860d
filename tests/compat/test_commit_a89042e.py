"""Files that commit a89042e wrote are read: checkpoints, records, flags, figures, exported models.

With the sizes in `SMALL`, that commit ran, in the folder of `text`:

    python -m models.one_billion_word.train --data_dir=text --train_pattern=train.txt \
        --heldout_pattern=heldout.txt --vocab_size=284 --sequence_length=12 --batch_size=4 \
        --num_microbatches=2 --mesh_shape=layers:2 --save_every=3 --steps=3 --logdir=run
    pipemesh export --logdir=run --to=exported --length=6
    pipemesh train --model=tests.training.small_models.StagedPoints --steps=3 --save_every=3 \
        --logdir=points
    pipemesh plan --model=tests.training.small_models.PlannedPoints --devices=2 --save=figures.json

`expected.json` has its results for these files: both runs resumed to step 6, `pipemesh score` and
`decode`, and the signatures of the exported model.
"""

import json
import lzma
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.checkpoint import Manifest, convert
from pipemesh.commands import plan
from pipemesh.commands.flags import read_toml
from pipemesh.report import page, read
from tests.models.one_billion_word.program import finish, open_process
from tests.warm import warm

FILES = pathlib.Path(__file__).parent / "a89042e"
EXPECTED = json.loads((FILES / "expected.json").read_text())
# Runs a module with its arguments, and the language model in a smaller size than its flags allow.
SMALL = """
import runpy, sys
from models.one_billion_word import sizes
for name, value in {"MODEL_DIM": 8, "HIDDEN_DIM": 16, "NUM_LAYERS": 2, "NUM_HEADS": 2}.items():
    setattr(sizes.Tiny, name, value)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TRAIN = "models.one_billion_word.train"


def done(*words):
    """Runs a module in a folder with the old files; returns its standard output."""
    for path in FILES.iterdir():
        if not pathlib.Path(path.name).exists():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, path.name)
    code, out, err = finish(open_process(warm("-c", SMALL, *words)))
    assert code == 0, err
    return out


def events(folder, kind):
    lines = pathlib.Path(folder, "record.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def losses_after(folder, step):
    """The losses of a run in the steps after `step`."""
    return [event["loss"] for event in events(folder, "step") if event["step"] > step]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, folder, module",
    [
        ("language_model", "run", [TRAIN]),
        ("points", "points", ["pipemesh", "train"]),
    ],
)
def test_a_run_resumes_with_the_same_losses(name, folder, module):
    """Weights, optimizer, position in the data and flags are those of the old run."""
    out = done(*module, f"--logdir={folder}", "--steps=6")
    assert "changed since the checkpoint" not in out
    expected = EXPECTED[name]
    assert events(folder, "begin")[-1]["restored"] == f"{folder}/ckpt-3"
    assert losses_after(folder, 3) == pytest.approx([*expected["losses"].values()], rel=1e-5)
    assert events(folder, "final")[-1]["loss"] == pytest.approx(expected["heldout"], rel=1e-5)


@pytest.mark.slow
def test_a_run_of_old_flags_has_the_same_losses():
    done(TRAIN, "--config=run/config.toml", "--logdir=new")
    assert losses_after("new", 0) == pytest.approx(losses_after("run", 0), rel=1e-5)
    assert read_toml("new/config.toml") == read_toml("run/config.toml")


@pytest.mark.slow
def test_a_text_has_the_same_score():
    out = done("pipemesh", "score", "--logdir=run", "--prompt=a dog", "--format=json")
    score, expected = json.loads(out), EXPECTED["score"]
    assert score["tokens"] == expected["tokens"]
    assert score["log_probs"] == pytest.approx(expected["log_probs"], abs=1e-4)


@pytest.mark.exhaustive
def test_a_text_is_continued_as_before():
    out = done(
        "pipemesh", "decode", "--logdir=run", "--prompt=a dog", "--max_tokens=4", "--temperature=0"
    )
    assert out == EXPECTED["decode"]


@pytest.mark.exhaustive
def test_the_held_out_loss_is_the_recorded_one():
    out = done("pipemesh", "evaluate", "--logdir=run")
    (final,) = events("run", "final")
    assert f"run/ckpt-3, step 3: {final['judged']:.3f} bits/byte" in out


@pytest.mark.parametrize("folder", ["run", "points"])
def test_a_checkpoint_is_whole_and_can_be_converted(folder):
    path = str(FILES / folder / "ckpt-3")
    assert Manifest.read(path).step == 3
    shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    line = convert(path, "ckpt-3", {name: name for name in shapes if not name.startswith("data/")})
    assert f"tensors of {path}" in line


@pytest.mark.parametrize("folder", ["run", "points"])
def test_a_record_makes_a_page(folder):
    text = page(read(str(FILES / folder)))
    assert "held out" in text
    for event in events(FILES / folder, "final"):
        assert f"{event['loss']:.4g}" in text


def test_figures_rank_plans_as_before(capsys):
    assert plan.main(["plan", str(FILES / "figures.json"), "--devices=2"]) == 0
    out = capsys.readouterr().out
    assert "figures: tests.training.small_models.PlannedPoints, x86_64, 2 cores, 2 devices; " in out
    milliseconds = [line.split()[6] for line in out.splitlines() if line.startswith("layers:")]
    assert milliseconds == ["3.368", "3.483", "3.612", "3.832", "3.856"]
    assert "best: mesh=layers:1 boundaries=0,5 remat=none" in out


def test_an_exported_model_is_served():
    shutil.copytree(FILES / "exported", "exported")
    packed = pathlib.Path("exported/saved_model.pb.xz")
    pathlib.Path("exported/saved_model.pb").write_bytes(lzma.decompress(packed.read_bytes()))
    signatures, expected = tf.saved_model.load("exported").signatures, EXPECTED["exported"]
    texts = {"ids": tf.constant(expected["ids"]), "lengths": tf.constant(expected["lengths"])}
    scores = signatures["score"](**texts)["log_probs"]
    np.testing.assert_allclose(scores, expected["score"], rtol=1e-4)
    decoded = signatures["decode"](**texts, max_tokens=tf.constant(expected["max_tokens"]))
    assert decoded["tokens"].numpy().tolist() == expected["decode"]["tokens"]
    np.testing.assert_allclose(decoded["log_probs"], expected["decode"]["log_probs"], rtol=1e-4)
