"""Trouble from outside: what ends a training saves it first, what need not end it does not."""

import functools
import os

import numpy as np
import pytest

from pipemesh.checkpoint import Folder, newest
from pipemesh.errors import DataError, TrainingError
from pipemesh.plan import Plan
from pipemesh.training.trainer import Trainer
from tests.models.one_billion_word.program import finish, refused, start
from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    scalars,
    small_request,
    weights,
)


@pytest.fixture
def text(corpus, tmp_path):
    """So little to train on that an epoch is a few steps."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in (1, 2):
        lines = corpus.train.lines[number * 12 : number * 12 + 12]
        (folder / f"train-{number}").write_text("\n".join(lines), encoding="utf-8")
    (folder / "heldout").write_text("\n".join(corpus.heldout.lines[:9]), encoding="utf-8")
    return folder


@pytest.fixture
def after(monkeypatch):
    """Calls a function when a step is done, once."""
    actions = {}
    real = Trainer.train_steps

    def train_steps(self, most):
        results = real(self, most)
        actions.pop(self.step, lambda: None)()
        return results

    monkeypatch.setattr(Trainer, "train_steps", train_steps)
    return actions.__setitem__


def vanish(path, kept):
    path.rename(kept)


def lose_the_end(path, kept):
    kept.write_bytes(path.read_bytes())
    os.truncate(path, 40)


# More than what is read ahead when text vanishes twice.
STEPS = 90


@pytest.mark.slow
def test_text_that_vanishes_or_changes_saves_and_goes_on_bit_for_bit_when_it_is_back(
    text, tmp_path, train, after
):
    whole = tmp_path / "whole"
    assert train(small_request(whole, text, steps=STEPS, save_every=1000)) == 0
    path, kept, logdir, step = text / "train-1", tmp_path / "kept", tmp_path / "run", 0
    for save_every, trouble, told in (
        # None is saved before.
        (1000, lose_the_end, "/train-1' says something else than when tra.*"),
        (4, vanish, "/train-1; No such file.*"),
    ):
        after(step + 6, functools.partial(trouble, path, kept))
        gone = rf"^step \d+: the data to train on cannot be read any more \(.*{told}"
        with pytest.raises(DataError, match=rf"{gone}\); saved .*/ckpt-\d+: put the data back"):
            train(small_request(logdir, text, steps=STEPS, save_every=save_every))
        kept.replace(path)
        begun, step = step, int(newest(str(logdir)).rpartition("-")[2])
        assert begun + 6 < step < STEPS, "what was read ahead was trained on"
    assert train(small_request(logdir, text, steps=STEPS, save_every=1000)) == 0
    assert_same_weights(weights(logdir, STEPS), weights(whole, STEPS))


@pytest.mark.slow
def test_held_out_text_that_vanishes_is_not_missed_while_training(text, tmp_path, train, after):
    after(1, (text / "heldout").unlink)
    logdir = tmp_path / "run"
    assert train(small_request(logdir, text, eval_every=2)) == 0
    assert len(scalars(logdir, "loss", "heldout")) == 3
    # All of it is asked for at the end.
    (text / "heldout").write_text("Some text to judge by.\n" * 9)
    after(7, (text / "heldout").unlink)
    with pytest.raises(DataError, match="the held-out data cannot be read any more"):
        train(small_request(logdir, text, steps=9, eval_batches=None, other_text=True))
    assert (logdir / "ckpt-9.index").exists()


# A limit on the size of files stands for a full disk. In a process of its own: it holds for all
# files, those that tests report to as well.
FULL_DISK = """
import resource, sys, threading
from models.one_billion_word import sizes, train
from pipemesh.training import trainer
from pipemesh.commands import process

sizes.Tiny.NUM_LAYERS = 1
real, unlimited = trainer.Trainer.train_steps, resource.getrlimit(resource.RLIMIT_FSIZE)

def train_steps(self, most):
    results = real(self, most)
    # Too small for a summary, then for the weights.
    limits = {4: 10, 5: 100_000, 8: unlimited[0], 10: 100_000}
    if self.step in limits:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[self.step], unlimited[1]))
    return results

trainer.Trainer.train_steps = train_steps
process.run(train.main)
"""


@pytest.mark.slow
def test_a_full_disk_and_a_reader_that_leaves_end_no_training(tmp_path):
    """Earlier checkpoints are kept."""
    flags = [f"--logdir={tmp_path}", "--mesh_shape=layers:1", "--steps=11"]
    process = start(*flags, code=FULL_DISK)
    # As `| head -1` does.
    assert process.stdout.readline().startswith("OneBillionWordTiny on ")
    process.stdout.close()
    process.stdout = None
    code, _, err = finish(process)
    assert code == 2, err
    assert err.count("standard output is closed (Broken pipe); going on") == 1
    assert "Error" not in err
    assert f"{tmp_path}/ckpt-6 cannot be written (" in err
    assert f"training goes on, and {tmp_path}/ckpt-3 is kept" in err
    assert err.count("--tracker=tensorboard: step 4 cannot be tracked (") == 1
    # At the end there is no later attempt.
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {tmp_path}/ckpt-11 cannot be written (")
    assert last.endswith(f"of the checkpoints before, {tmp_path}/ckpt-9 is kept")
    names = {path.name for path in tmp_path.glob("ckpt-*")}
    assert {"ckpt-3.index", "ckpt-9.index"} <= names
    assert not [name for name in names if "-6" in name or "-11" in name], "no half checkpoint"


@pytest.mark.slow
def test_a_log_directory_that_cannot_be_written_to_ends_no_training(
    text, tmp_path, train, after, capsys
):
    logdir = tmp_path / "run"
    logdir.mkdir()
    (logdir / "layout.txt").symlink_to("/dev/full")
    (logdir / "train").write_text("a file stands in its place")

    def take_away():
        logdir.rename(tmp_path / "away")
        logdir.write_text("a file stands in its place")

    def bring_back():
        logdir.unlink()
        (tmp_path / "away").rename(logdir)

    after(3, take_away)
    after(5, bring_back)
    assert train(small_request(logdir, text, save_every=2)) == 0
    out, err = capsys.readouterr()
    assert err.count("ckpt-4 cannot be written") == 1
    assert "the layout of the weights cannot be written ([Errno 28] No space left on device" in out
    assert err.count("--tracker=tensorboard: step 1 cannot be tracked (") == 1, "once for all steps"
    assert (logdir / "ckpt-6.index").exists()


def test_a_second_training_in_the_same_directory_is_refused(tmp_path):
    with Folder(str(tmp_path)):
        line = refused(f"--logdir={tmp_path}")
    assert "is in use: another run writes to it" in line


@pytest.fixture
def spoil(monkeypatch):
    """Makes the weights of tokens of the batches of some steps no numbers."""
    spoiled = set()
    real = Trainer._next_batch

    def next_batch(self):
        batch = real(self)
        if self.step + 1 in spoiled:
            batch = {**batch, "weights": batch["weights"] * float("nan")}
        return batch

    monkeypatch.setattr(Trainer, "_next_batch", next_batch)
    return spoiled.update


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_counted_and_said_under_every_plan(
    text, tmp_path, train, spoil, capsys
):
    """A run of ten ends a training."""
    spoil({3, 4, 6, *range(10, 1000)})

    def check(name, plan, steps, lines):
        request = small_request(tmp_path / name, text, steps=steps, plan=plan, save_every=3)
        try:
            assert train(request) == 0
        finally:
            err = capsys.readouterr().err
            assert err.count("skipped, its weights are those before") == lines
            assert "step 3: stage 'd" in err and "(1 step skipped so far)" in err
            assert "step 6: " in err and "(3 steps skipped so far)" in err

    check("split", Plan("layers:2", schedule="zb_h1", num_microbatches=2), 8, 2)
    # The checkpoint of step 3 has the weights of step 2, which step 5 has shown to be good.
    assert weights(tmp_path / "split", 8)["skipped_steps"] == 3
    with pytest.raises(TrainingError) as caught:
        # One line for all of the run.
        check("plain", Plan(num_microbatches=1), 100, 3)
    told, kept = str(caught.value), tmp_path / "plain" / "ckpt-6"
    assert told.startswith("step 19: 10 steps in a row were skipped, the last one since stage ")
    assert f"of good checkpoints, {kept} is kept" in told and weights(kept.parent, 6)
    assert not (tmp_path / "plain" / "ckpt-9.index").exists(), "nobody knows whether it was good"
    found, plain = (scalars(tmp_path / name, "loss") for name in ("split", "plain"))
    assert (len(found), len(plain)) == (5, 6)
    np.testing.assert_allclose(found, plain[:5], rtol=1e-5)
