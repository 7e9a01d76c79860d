"""The program as users start it: what it prints, writes and survives."""

import re
import signal

import numpy as np
import pytest

from models.one_billion_word.corpus import embedded_corpus
from tests.models.one_billion_word.program import finish, run, start, wait_for
from tests.models.one_billion_word.small_training import summaries

pytestmark = pytest.mark.slow


def scalars(logdir, part="train"):
    """The last value of each scalar at each step."""
    return {(tag, step): value for tag, step, value in summaries(logdir, part)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The log directory of a run of three steps, and what it printed."""
    logdir = tmp_path_factory.mktemp("train")
    return logdir, run(f"--logdir={logdir}", "--steps=3", "--seed=0", "--schedule=zb_h1")


def test_what_it_prints_and_writes(begun):
    logdir, out = begun
    assert "layers:2, 2 microbatches of 2 x 32 tokens" in out
    assert "0      NamedEmbedding + NamedBlock" in out
    assert "CPU:1" in out
    # As many as this Python's own documentation has.
    number = len(list(embedded_corpus().heldout))
    assert (
        f"evaluation while training: 2 batches of sentences drawn evenly from all {number} "
        "held-out ones" in out
    )
    assert "held out at step 3: " in out
    assert "smoothed unigram model, same tokens: " in out
    assert f"checkpoint: {logdir}/ckpt-3" in out
    told = out.partition("predicted of a step:\n")[2].splitlines()
    assert told[0].split()[:3] == ["device", "weights", "optimizer"]
    assert told[1].startswith("CPU:0 ") and told[2].startswith("CPU:1 ")
    assert [line.split()[:3] for line in told[5:7]] == [
        ["layers", "activations", "2"],
        ["layers", "gradients", "2"],
    ]
    # Between two stages that are equal, and one that leaves a half of its time to the other.
    assert 15 < float(re.search(r"^bubble (\d+\.\d)%$", out, re.MULTILINE)[1]) < 50
    assert f"layout of the weights: {logdir}/layout.txt" in out
    assert "stack.d0.cell_000.table " in (logdir / "layout.txt").read_text()
    assert re.search(r"measured over 2 steps: [\d,]+ tokens/s, MFU \d+\.\d% of [\d,]+ GFLOP/s", out)
    train = scalars(logdir)
    assert {step for _, step in train} == {1, 2, 3}
    scores = {"loss", "bits_per_byte", "token_perplexity", "word_perplexity"}
    assert {tag for tag, _ in train} == {
        *(*scores, "seconds", "learning_rate", "gradient_norm", "tokens_per_second", "mfu")
    }
    assert all(0 < value < 1 for (tag, _), value in train.items() if tag == "mfu")
    assert ("tokens_per_second", 1) not in train, "the first step builds the graph"
    assert np.isfinite(list(train.values())).all()
    assert {step for _, step in scalars(logdir, "heldout")} == {3}
    written = (logdir / "config.toml").read_text()
    assert 'schedule = "zb_h1"\n' in written and "logdir" not in written


def test_it_resumes_with_its_flags_saves_if_interrupted_and_keeps_what_is_saved(begun):
    logdir, _ = begun
    process = start(f"--logdir={logdir}", "--steps=100000", "--schedule=gpipe")
    wait_for(logdir / "ckpt-6.index", process)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    told = out.partition("resuming with saved flags: ")[2].splitlines()[0]
    assert "--seed=0" in told and "schedule" not in told
    assert "changed since the checkpoint: schedule zb_h1 -> gpipe\n" in out
    assert "SIGINT: saved " in out
    saved = sorted(logdir.glob("ckpt-*.index"))
    step = max(int(path.stem.removeprefix("ckpt-")) for path in saved)
    assert max(step for _, step in scalars(logdir)) == step

    # Such a rate spoils the weights in one step: the next one finds out, or the evaluation before
    # the last checkpoint, whichever comes first. What was begun to be saved in between is none.
    for flags, expected in [
        # What layers hand on stays finite, since it is normalized; the logits are too large.
        (["--on_nonfinite=stop", "--save_every=1000"], f"error: step {step + 2}: stage 'd1'"),
        ([f"--steps={step + 1}"], f"error: step {step + 1}: evaluation: stage 'd"),
    ]:
        diverging = [f"--logdir={logdir}", "--learning_rate=1e30", "--steps=100000", *flags]
        code, out, err = finish(start(*diverging))
        assert code == 2
        last = err.strip().splitlines()[-1]
        assert last.startswith(expected)
        # The pipeline's own check, or one of lingvo's inside of a layer.
        assert re.search(r"not finite|had (NaN|Inf|-Inf)", last), last
        assert "give a lower --learning_rate" in last
        assert f"{logdir}/ckpt-{step} is kept" in last
        assert sorted(logdir.glob("ckpt-*.index")) == saved
