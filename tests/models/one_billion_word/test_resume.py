"""What a checkpoint knows of its text, its vocabulary and its settings when training goes on."""

import gzip
import os
import shutil

import numpy as np
import pytest

from models.one_billion_word.about import About
from pipemesh.checkpoint import Manifest
from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan
from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    begun,
    scalars,
    small_request,
    weights,
)

pytestmark = pytest.mark.slow


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


def test_one_line_more_is_other_text_and_never_another_vocabulary(text, logdir, train, capsys):
    """The vocabulary was learned again once, under weights that knew the old one: held-out went
    from 2.56 to 3.98 bits a byte, without a word."""
    before = about_of(logdir / "ckpt-3")
    with open(text / "train-1", "a") as file:
        file.write("One line more, with words that nobody knows: zyx, wvu.\n")
    with pytest.raises(CheckpointError, match=r"other text \(train \w+ -> \w+\)"):
        train(small_request(logdir, text, steps=6))
    capsys.readouterr()
    assert train(small_request(logdir, text, steps=6, other_text=True)) == 0
    out = capsys.readouterr().out
    assert "other text, under the vocabulary of the checkpoint: train " in out
    assert "the text is read from its beginning" in out
    after = about_of(logdir / "ckpt-6")
    assert after.vocabulary == before.vocabulary
    assert after.data["train"] != before.data["train"]
    # From now on this is the text.
    assert train(small_request(logdir, text, steps=7)) == 0
    assert "other text" not in capsys.readouterr().out


def test_a_copy_elsewhere_is_the_same_text_and_goes_on_bit_for_bit(
    text, whole, logdir, tmp_path, train
):
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in text.iterdir():
        (other / path.name).write_bytes(gzip.compress(path.read_bytes()))
    shutil.rmtree(text)
    # Nor is the file of the vocabulary needed: the checkpoint has it.
    shutil.rmtree(logdir / "vocabulary")
    assert train(small_request(logdir, other, steps=6)) == 0
    assert_same_weights(weights(logdir, 6), weights(whole, 6))


def test_other_text_to_judge_by_needs_the_flag_too_and_keeps_the_place(
    text, whole, logdir, train, capsys
):
    (text / "heldout").write_text("Some other text to judge by, rather short.\n" * 9)
    with pytest.raises(CheckpointError, match=r"other text \(heldout "):
        train(small_request(logdir, text, steps=6))
    capsys.readouterr()
    train(small_request(logdir, text, steps=6, other_text=True))
    out = capsys.readouterr().out
    assert "checkpoint: heldout " in out and "from its beginning" not in out
    assert_same_weights(weights(logdir, 6), weights(whole, 6))


def test_settings_that_changed_are_listed(text, logdir, train, capsys):
    capsys.readouterr()
    changes = {
        "LEARNING_RATE": 0.25,
        "BATCH_SIZE": 4,
        "plan": Plan(num_microbatches=2, compute_dtype="bfloat16"),
    }
    assert train(small_request(logdir, text, steps=6, **changes)) == 0
    out = capsys.readouterr().out
    assert (
        "changed since the checkpoint: compute_dtype none -> bfloat16, batch_size 8 -> 4, "
        "learning_rate 0.4 -> 0.25\n"
    ) in out
    assert "the text is read from its beginning, in the order of epochs to come" in out
    train(small_request(logdir, text, steps=7, **changes))
    assert "changed since the checkpoint" not in capsys.readouterr().out


def test_a_checkpoint_whose_bits_flipped_is_found_and_the_one_before_serves(
    whole, text, tmp_path, train, capsys
):
    logdir = begun(whole, 3, tmp_path / "run")
    begun(whole, 6, tmp_path / "newer")
    for path in (tmp_path / "newer").glob("ckpt-6.*"):
        path.rename(logdir / path.name)
    (path,) = logdir.glob("ckpt-6.data-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert train(small_request(logdir, text, steps=6)) == 0
    said = capsys.readouterr()
    assert f"{logdir}/ckpt-6 is damaged: {logdir}/ckpt-6.data-00000-* cannot be read" in said.err
    assert f"set aside as damaged-ckpt-6, going back to {logdir}/ckpt-3" in said.err
    assert f"going on from {logdir}/ckpt-3" in said.out
    assert_same_weights(weights(logdir, 6), weights(whole, 6))
    assert (logdir / "damaged-ckpt-6.index").exists()


def test_a_manifest_whose_bits_flipped_is_found_before_a_step(text, logdir, train):
    (path,) = logdir.glob("ckpt-3.manifest")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="no whole checkpoint, only damaged ones"):
        train(small_request(logdir, text, steps=6))
    assert os.path.exists(logdir / "damaged-ckpt-3.index")


def test_training_goes_from_placement_to_simd_and_back_with_the_same_losses(
    text, tmp_path, train, capsys
):
    rules = "batch:data;heads:model;d_ff:model;vocab:model"
    plans = [
        Plan("layers:2", num_microbatches=2),
        Plan("layers:2;data:2;model:2", rules, "gpipe", num_microbatches=2, lowering="simd"),
    ]
    whole, logdir = tmp_path / "whole", tmp_path / "run"
    train(small_request(whole, text, steps=6, plan=plans[0], NUM_LAYERS=2, save_every=2))
    begun(whole, 2, logdir)
    for steps, plan in ((4, plans[1]), (6, plans[0])):
        request = small_request(logdir, text, steps=steps, plan=plan, NUM_LAYERS=2, save_every=2)
        assert train(request) == 0
    mine, wanted = scalars(logdir, "loss"), scalars(whole, "loss")
    assert len(wanted) == 6
    np.testing.assert_allclose(mine, wanted[2:], rtol=1e-5)
    assert weights(logdir, 6).keys() == weights(whole, 6).keys()
    assert about_of(logdir / "ckpt-4").plan["lowering"] == "simd"
    out = capsys.readouterr().out
    assert "all    NamedEmbedding" in out and "all    NamedSoftmax" in out
    assert "lowering placement -> simd" in out
