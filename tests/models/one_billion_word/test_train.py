"""The program as users start it: what it prints, writes, survives and refuses."""

import concurrent.futures
import os
import pathlib
import re
import shutil
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.models.one_billion_word.program import (
    finish,
    refused,
    run,
    start,
    start_cold,
    wait_for,
)
from tests.models.one_billion_word.small_training import summaries


def checkpoint(logdir, step):
    """Everything that is saved but the position in the data, by name."""
    reader = tf.train.load_checkpoint(str(logdir / f"ckpt-{step}"))
    names = [n for n in reader.get_variable_to_shape_map() if not n.startswith("data/")]
    return {name: reader.get_tensor(name) for name in names}


def scalars(logdir, part="train"):
    """The last value of each scalar at each step."""
    return {(tag, step): value for tag, step, value in summaries(logdir, part)}


def losses(logdir):
    return {step: value for (tag, step), value in scalars(logdir).items() if tag == "loss"}


def assert_same(logdir, other, step, **tolerance):
    mine, theirs = checkpoint(logdir, step), checkpoint(other, step)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_allclose(value, theirs[name], err_msg=name, **tolerance)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The log directory of six steps without interruption."""
    logdir = tmp_path_factory.mktemp("whole")
    run(f"--logdir={logdir}", "--steps=6")
    return logdir


@pytest.mark.slow
def test_what_it_prints_and_writes(tmp_path):
    out = run(f"--logdir={tmp_path}", "--steps=3", start=start_cold)
    assert "layers:2, 2 microbatches of 2 x 32 tokens" in out
    assert "0      NamedEmbedding + 3 NamedBlock" in out
    assert "CPU:1" in out
    assert (
        "evaluation while training: 2 batches of sentences drawn evenly from all 196 held-out ones"
        in out
    )
    assert "held out at step 3: " in out
    assert "smoothed unigram model, same tokens: " in out
    assert f"checkpoint: {tmp_path}/ckpt-3" in out
    told = out.partition("predicted of a step:\n")[2].splitlines()
    assert told[0].split()[:3] == ["device", "weights", "optimizer"]
    assert told[1].startswith("CPU:0 ") and told[2].startswith("CPU:1 ")
    assert [line.split()[:3] for line in told[5:7]] == [
        ["layers", "activations", "2"],
        ["layers", "gradients", "2"],
    ]
    # Between a third, if the two stages were equal, and what the slower one leaves to the other.
    assert 25 < float(re.search(r"^bubble (\d+\.\d)%$", out, re.MULTILINE)[1]) < 50
    assert f"layout of the weights: {tmp_path}/layout.txt" in out
    assert "stack.d0.cell_000.table " in (tmp_path / "layout.txt").read_text()
    assert re.search(r"measured over 2 steps: [\d,]+ tokens/s, MFU \d+\.\d% of [\d,]+ GFLOP/s", out)
    train = scalars(tmp_path)
    assert {step for _, step in train} == {1, 2, 3}
    scores = {"loss", "bits_per_byte", "token_perplexity", "word_perplexity"}
    assert {tag for tag, _ in train} == {*scores, "learning_rate", "tokens_per_second", "mfu"}
    assert all(0 < value < 1 for (tag, _), value in train.items() if tag == "mfu")
    assert ("tokens_per_second", 1) not in train, "the first step builds the graph"
    assert np.isfinite(list(train.values())).all()
    assert {step for _, step in scalars(tmp_path, "heldout")} == {3}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The log directory of a training that was killed, back at the checkpoint of step 3."""
    logdir = tmp_path_factory.mktemp("killed")
    process = start(f"--logdir={logdir}", "--steps=100000")
    wait_for(logdir / "ckpt-3.index", process)
    process.kill()
    finish(process)
    # It may have gone beyond step 6 by then.
    for path in logdir.glob("ckpt-*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("ckpt-3."):
            path.unlink()
    return logdir


@pytest.mark.slow
def test_killed_training_resumes_the_same_bit_for_bit(whole, killed, tmp_path):
    logdir = shutil.copytree(killed, tmp_path / "run")
    assert f"going on from {logdir}/ckpt-3" in run(f"--logdir={logdir}", "--steps=6")
    for step in (3, 6):
        assert_same(logdir, whole, step, rtol=0, atol=0)
    assert any("beta1_power" in name for name in checkpoint(logdir, 6))
    mine, theirs = losses(logdir), losses(whole)
    assert {step: mine[step] for step in theirs} == theirs


@pytest.mark.slow
def test_killed_training_resumes_on_another_mesh(whole, killed, tmp_path):
    logdir = shutil.copytree(killed, tmp_path / "run")
    out = run(f"--logdir={logdir}", "--steps=6", "--mesh_shape=layers:1")
    assert f"going on from {logdir}/ckpt-3" in out
    mine, theirs = losses(logdir), losses(whole)
    np.testing.assert_allclose([mine[s] for s in theirs], list(theirs.values()), rtol=1e-4)


@pytest.mark.slow
def test_an_interrupt_saves_and_the_loss_that_is_no_number_keeps_what_is_saved(whole, tmp_path):
    process = start(f"--logdir={tmp_path}", "--steps=100000")
    wait_for(tmp_path / "ckpt-3.index", process)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "SIGINT: saved " in out
    saved = sorted(tmp_path.glob("ckpt-*.index"))
    step = max(int(path.stem.removeprefix("ckpt-")) for path in saved)
    mine, theirs = losses(tmp_path), losses(whole)
    assert [mine[s] for s in theirs if s <= step] == [theirs[s] for s in theirs if s <= step]

    # Such a rate spoils the weights in one step: the next one finds out, or the evaluation before
    # the last checkpoint, whichever comes first. What was begun to be saved in between is none.
    diverging = [f"--logdir={tmp_path}", "--learning_rate=1e30"]
    row = "10 steps in a row were skipped, the last one since stage 'd1'"
    for flags, expected in [
        # What layers hand on stays finite, since it is normalized; the logits are too large.
        (["--on_nonfinite=stop", "--save_every=1000"], f"error: step {step + 2}: stage 'd1'"),
        (["--save_every=1"], f"error: step {step + 11}: {row}"),
        ([f"--steps={step + 1}"], f"error: step {step + 1}: evaluation: stage 'd"),
    ]:
        code, out, err = finish(start(*diverging, "--steps=100000", *flags))
        assert code == 2
        last = err.strip().splitlines()[-1]
        assert last.startswith(expected)
        # The pipeline's own check, or one of lingvo's inside of a layer.
        assert re.search(r"not finite|had (NaN|Inf|-Inf)", last), last
        assert "give a lower --learning_rate" in last
        assert f"{tmp_path}/ckpt-{step} is kept" in last
        assert sorted(tmp_path.glob("ckpt-*.index")) == saved


@pytest.mark.slow
def test_who_goes_on_takes_the_flags_that_it_was_begun_with(whole, tmp_path):
    logdir = tmp_path / "run"
    flags = ["--mesh_shape=layers:3", "--schedule=zb_h1", "--seed=0", "--steps=3"]
    run(f"--logdir={logdir}", *flags)
    written = (logdir / "config.toml").read_text()
    assert 'mesh_shape = "layers:3"\n' in written and "logdir" not in written
    # The program's own small flags are given each time.
    out = run(f"--logdir={logdir}", "--steps=6", "--schedule=gpipe")
    assert "resuming with saved flags: " in out
    told = out.partition("resuming with saved flags: ")[2].splitlines()[0]
    assert "--mesh_shape=layers:3" in told and "schedule" not in told and "--seed=0" in told
    assert "changed since the checkpoint: schedule zb_h1 -> gpipe\n" in out
    mine, theirs = losses(logdir), losses(whole)
    np.testing.assert_allclose([mine[s] for s in theirs], list(theirs.values()), rtol=1e-4)
    # And from its file to another training.
    other = run(f"--logdir={tmp_path / 'other'}", f"--config={logdir / 'config.toml'}", "--steps=1")
    assert "plan: mesh=layers:3 schedule=gpipe" in other


@pytest.fixture
def trained(whole, tmp_path):
    """A log directory of one's own that holds the checkpoints of steps 3 and 6."""
    return pathlib.Path(shutil.copytree(whole, tmp_path / "trained"))


BAD_INPUT = [
    (["--model=OneBillionWordTin"], "--model='OneBillionWordTin'", "OneBillionWordTiny?"),
    (["--mesh_shape=layers:x"], "--mesh_shape='layers:x'", "'layers:2'"),
    (["--mesh_shape=layers:2;model:2"], "axis 'model'", "rule such as 'batch:model'"),
    (["--mesh_shape=layers:2;data:2", "--layout=batch:dta"], "'batch:dta'", "did you mean 'data'?"),
    (
        ["--mesh_shape=layers:2;data:2", "--layout=heads:data", "--layers=lingvo"],
        "dim 'heads'",
        "known: 'batch'",
    ),
    (["--layout=batch:layers"], "'batch:layers'", "split the batch over another axis"),
    (
        ["--mesh_shape=layers:2;data:2", "--layout=batch:data", "--num_microbatches=4"],
        "--num_microbatches=4: a batch of 4 does not divide",
        "of 2 replicas; num_microbatches may be 1, 2",
    ),
    (
        ["--mesh_shape=layers:2;data:3", "--layout=batch:data"],
        "--batch_size=4: a batch of 4 does not divide among the 3 replicas",
        "use a multiple of 6",
    ),
    (["--mesh_shape=layers:8"], "--mesh_shape='layers:8'", "at most 7 stages"),
    (["--device_type=GPU"], "--mesh_shape='layers:2' needs 2 GPUs", "--device_type=CPU"),
    (["--num_microbatches=3"], "--num_microbatches=3", "1, 2, 4"),
    (["--num_microbatches=0"], "--num_microbatches=0", "above 0"),
    (["--data_dir=/no/such/folder"], "--data_dir='/no/such/folder'", "give a folder"),
    (["--train_pattern=*.txt"], "--train_pattern='*.txt'", "--data_dir"),
    (["--vocab_size=1000000"], "--vocab_size=1000000", "at most"),
    (["--learning_rate=nan"], "--learning_rate=nan", "above 0"),
    (["--learning_rate=inf"], "--learning_rate=inf", "finite"),
    (["--learning_rate=1e39"], "--learning_rate=1e+39", "at most 3.4e+38"),
    (["--batch_size=99999999999"], "--batch_size=99999999999", "at most 2147483647"),
    (["--seed=9223372036854775808"], "--seed=9223372036854775808", "64 bits"),
    (["--data_dir="], "--data_dir='' is empty", "leave the flag out"),
    (["trash"], "'trash'", "--"),
    (["--step=3"], "unknown flag --step", "--steps?"),
    (["--save_every=0"], "--save_every=0", "at least 1"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What the program says to each of BAD_INPUT; two processes at a time."""
    logdir = tmp_path_factory.mktemp("bad")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lines = list(
            pool.map(
                lambda case: refused(f"--logdir={logdir / str(case[0])}", *case[1][0]),
                enumerate(BAD_INPUT),
            )
        )
    # Nothing that stands in the way of the next attempt; a vocabulary serves it.
    assert not [path for path in logdir.rglob("*.*") if path.parent.name != "vocabulary"]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BAD_INPUT)))
def test_bad_input_is_told_in_one_line(refusals, number):
    for part in BAD_INPUT[number][1:]:
        assert part in refusals[number]


def test_an_empty_folder_of_data(tmp_path):
    assert f"--data_dir={str(tmp_path)!r} is empty" in refused(f"--data_dir={tmp_path}")


@pytest.mark.slow
def test_another_models_checkpoint_is_left_alone(trained):
    line = refused(f"--logdir={trained}", "--sequence_length=64", start=start)
    assert f"--logdir={str(trained)!r} holds a checkpoint of another model" in line
    assert "sequence_length 32 -> 64" in line


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(trained):
    (data,) = trained.glob("ckpt-6.data*")
    os.truncate(data, 1000)
    code, out, err = finish(start(f"--logdir={trained}", "--steps=3"))
    assert code == 0
    assert f"{trained}/ckpt-6 is damaged: {data} has 1,000 bytes of " in err
    assert f"set aside as damaged-ckpt-6, going back to {trained}/ckpt-3" in err
    assert f"going on from {trained}/ckpt-3" in out
