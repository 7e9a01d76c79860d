"""Resuming: text, vocabulary, settings, plans and lingvo's own checkpoints."""

import functools
import gzip
import shutil

import numpy as np
import pytest
import tensorflow as tf

from models.one_billion_word.about import About
from pipemesh.checkpoint import Checkpoints, Manifest, restore
from pipemesh.errors import CheckpointError
from pipemesh.layers import export_to_lingvo, import_from_lingvo
from pipemesh.plan import Plan
from tests.models.one_billion_word.language_model import Training, random_batch, small
from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    begun,
    scalars,
    small_request,
    weights,
)


def about_of(checkpoint):
    return About.from_note(Manifest.read(str(checkpoint)).note)


@pytest.fixture(scope="module")
def original(corpus, tmp_path_factory):
    """A folder with two files to train on and one to judge by."""
    folder = tmp_path_factory.mktemp("text")
    for name, lines in (
        ("train-1", corpus.train.lines[:150]),
        ("train-2", corpus.train.lines[150:250]),
        ("heldout", corpus.heldout.lines[:60]),
    ):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def text(original, tmp_path):
    """The text in a folder of one's own."""
    return shutil.copytree(original, tmp_path / "text")


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(whole_folder, original, train):
    """Six steps without interruption, trained once."""
    if not (whole_folder / "ckpt-6.index").exists():
        assert train(small_request(whole_folder, original, steps=6)) == 0
    return whole_folder


@pytest.fixture
def logdir(whole, tmp_path):
    """The checkpoint of its step 3 in a folder of one's own."""
    return begun(whole, 3, tmp_path / "run")


@pytest.mark.slow
def test_one_line_more_is_other_text_and_never_another_vocabulary(text, logdir, train, capsys):
    """The vocabulary was learned again once, under weights that knew the old one: held-out went
    from 2.56 to 3.98 bits a byte, without a word."""
    before = about_of(logdir / "ckpt-3")
    with open(text / "train-1", "a") as file:
        file.write("One line more, with words that nobody knows: zyx, wvu.\n")
    with pytest.raises(CheckpointError, match=r"other text \(train \w+ -> \w+\)"):
        train(small_request(logdir, text, steps=6))
    capsys.readouterr()
    changed = {
        "LEARNING_RATE": 0.25,
        "plan": Plan(num_microbatches=2, compute_dtype="bfloat16"),
    }
    assert train(small_request(logdir, text, steps=6, other_text=True, **changed)) == 0
    out = capsys.readouterr().out
    assert (
        "changed since the checkpoint: compute_dtype none -> bfloat16, learning_rate 0.4 -> 0.25\n"
        in out
    )
    assert "other text, under the vocabulary of the checkpoint: train " in out
    assert "the text is read from its beginning" in out
    after = about_of(logdir / "ckpt-6")
    assert after.vocabulary == before.vocabulary
    assert after.data["train"] != before.data["train"]
    # From now on these are the text and the settings.
    assert train(small_request(logdir, text, steps=7, BATCH_SIZE=4, **changed)) == 0
    out = capsys.readouterr().out
    assert "other text" not in out
    assert "changed since the checkpoint: batch_size 8 -> 4\n" in out
    assert "the text is read from its beginning, in the order of epochs to come" in out


@pytest.mark.slow
def test_a_copy_goes_on_bit_for_bit_also_with_other_text_to_judge_by(
    text, whole, logdir, tmp_path, train, capsys
):
    (text / "heldout").write_text("Some other text to judge by, rather short.\n" * 9)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in text.iterdir():
        (other / path.name).write_bytes(gzip.compress(path.read_bytes()))
    shutil.rmtree(text)
    # Nor is the file of the vocabulary needed: the checkpoint has it.
    shutil.rmtree(logdir / "vocabulary")
    with pytest.raises(CheckpointError, match=r"other text \(heldout "):
        train(small_request(logdir, other, steps=6))
    capsys.readouterr()
    assert train(small_request(logdir, other, steps=6, other_text=True)) == 0
    out = capsys.readouterr().out
    assert "checkpoint: heldout " in out and "from its beginning" not in out
    assert_same_weights(weights(logdir, 6), weights(whole, 6))


@pytest.mark.slow
def test_a_run_goes_on_as_one_program_with_the_same_losses(text, tmp_path, train, capsys):
    settings = {"steps": 4, "NUM_LAYERS": 2, "save_every": 2}
    whole, before = tmp_path / "whole", Plan("layers:2", num_microbatches=2)
    after = Plan("layers:2", "vocab:layers", "gpipe", num_microbatches=2, lowering="simd")
    assert train(small_request(whole, text, plan=before, **settings)) == 0
    logdir = begun(whole, 2, tmp_path / "run")
    assert train(small_request(logdir, text, plan=after, **settings)) == 0
    np.testing.assert_allclose(scalars(logdir, "loss"), scalars(whole, "loss")[2:], rtol=1e-5)
    assert weights(logdir, 4).keys() == weights(whole, 4).keys()
    out = capsys.readouterr().out
    assert "all    NamedEmbedding" in out and "all    NamedSoftmax" in out
    assert "lowering placement -> simd" in out and "from its beginning" not in out


TENSOR = "heads:model;experts:model;vocab:model"
PLANS = {
    "plain": Plan(),
    "pipeline": Plan("layers:2", schedule="zb_h1", num_microbatches=2),
    "tensor": Plan("layers:1;model:2", "heads:model;expert_ff:model;vocab:model"),
    "data": Plan("layers:1;data:4", "batch:data;embed:data"),
    "mixed": Plan("model:2;layers:2;data:2", f"batch:data;embed:data;{TENSOR}", "1f1b", 2),
    "simd": Plan("layers:2;model:2", TENSOR, "gpipe", 2, lowering="simd"),
    "experts": Plan("layers:1;e:4", "experts:e"),
}
# The gradients of round-off stay what they are.
CALM = {
    "NUM_LAYERS": 2,
    "NUM_EXPERTS": 4,
    "HIDDEN_DIM": 16,
    "LEARNING_RATE": 0.02,
    "DROPOUT_PROB": 0.1,
}
STEPS = 2
BATCHES = [random_batch(seed) for seed in range(STEPS + 1)]


@functools.cache
def training_of(name, dtype):
    """A model for each plan."""
    values = PLANS[name].to_values() | {"compute_dtype": dtype}
    return Training(small(**CALM, PLAN=Plan.from_values(values), PIPELINED=name != "plain"))


@functools.cache
def saved(folder, name, dtype):
    """The checkpoint after some steps under a plan, and the loss of the next."""
    training = training_of(name, dtype)
    for batch in BATCHES[:STEPS]:
        training.step(batch)
    own = folder / f"{name}-{dtype}"
    own.mkdir()
    path = Checkpoints(str(own), training.state).save(STEPS, {})
    return path, training.step(BATCHES[STEPS])


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


def tensors(path):
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def check(saves, tmp_path, there, here, rtol):
    path, expected = saved(saves, *there)
    training = training_of(*here)
    assert restore(path, training.state) == []
    again = Checkpoints(str(tmp_path), training.state).save(STEPS, {})
    mine, theirs = tensors(again), tensors(path)
    assert mine.keys() == theirs.keys()
    assert any(name.endswith("/Adam_1") for name in mine)
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value, err_msg=name)
    np.testing.assert_allclose(training.step(BATCHES[STEPS]), expected, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans",
    [("simd",), pytest.param(tuple(PLANS), marks=pytest.mark.exhaustive)],
)
def test_weights_and_optimizer_are_those_that_were_saved_and_so_is_the_next_loss(
    eagerly, saves, tmp_path, plans
):
    """From each plan to the next one, and from the last one to none."""
    for there, here in zip(plans, [*plans[1:], "plain"], strict=True):
        check(saves, tmp_path, (there, ""), (here, ""), rtol=1e-5)


@pytest.mark.parametrize(
    ("there", "here", "precisions"),
    [
        pytest.param("simd", "plain", ("", "bfloat16"), marks=pytest.mark.slow),
        pytest.param("plain", "data", ("bfloat16", ""), marks=pytest.mark.exhaustive),
        pytest.param("mixed", "pipeline", ("", "bfloat16"), marks=pytest.mark.exhaustive),
    ],
)
def test_precision_may_change(eagerly, saves, tmp_path, there, here, precisions):
    """The plan sets the dtype of computation; weights and the optimizer's state are float32."""
    check(saves, tmp_path, *zip((there, here), precisions, strict=True), rtol=2e-2)


@pytest.mark.slow
def test_what_was_a_checkpoint_of_lingvo_goes_on_as_if_it_had_never_been_one(
    train, folder, tmp_path
):
    one, other = tmp_path / "one", tmp_path / "other"
    assert train(small_request(one, folder, LAYERS="lingvo")) == 0
    theirs = str(tmp_path / "theirs" / "train" / "ckpt-00000003")
    # The embedding and the block; the softmax.
    export_to_lingvo(str(one / "ckpt-3"), theirs, stages=(0, 2, 3))
    shutil.copytree(one / "vocabulary", other / "vocabulary")
    told = import_from_lingvo(theirs, str(other / "ckpt-3"), like=str(one / "ckpt-3"))
    assert told.endswith(f"tensors of {theirs}, data/batches of {one / 'ckpt-3'}")
    assert train(small_request(other, folder, LAYERS="lingvo")) == 0
    assert_same_weights(weights(one, 6), weights(other, 6))
