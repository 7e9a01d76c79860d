"""The program as users start it: what it prints, writes and survives."""

import re
import signal

import numpy as np
import pytest

from tests.models.one_billion_word.program import (
    finish,
    run,
    start,
    start_cold,
    wait_for,
)
from tests.models.one_billion_word.small_training import summaries


def scalars(logdir, part="train"):
    """The last value of each scalar at each step."""
    return {(tag, step): value for tag, step, value in summaries(logdir, part)}


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


@pytest.mark.slow
def test_an_interrupt_saves_and_the_loss_that_is_no_number_keeps_what_is_saved(tmp_path):
    process = start(f"--logdir={tmp_path}", "--steps=100000")
    wait_for(tmp_path / "ckpt-3.index", process)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "SIGINT: saved " in out
    saved = sorted(tmp_path.glob("ckpt-*.index"))
    step = max(int(path.stem.removeprefix("ckpt-")) for path in saved)
    assert max(step for _, step in scalars(tmp_path)) == step

    # Such a rate spoils the weights in one step: the next one finds out, or the evaluation before
    # the last checkpoint, whichever comes first. What was begun to be saved in between is none.
    diverging = [f"--logdir={tmp_path}", "--learning_rate=1e30"]
    for flags, expected in [
        # What layers hand on stays finite, since it is normalized; the logits are too large.
        (["--on_nonfinite=stop", "--save_every=1000"], f"error: step {step + 2}: stage 'd1'"),
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
def test_who_goes_on_takes_the_flags_that_it_was_begun_with(tmp_path):
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
    assert f"checkpoint: {logdir}/ckpt-6" in out
