"""Flags of optimizers and learning rates, from the command line to the record."""

import json
import math

import pytest

from pipemesh.commands.training_flags import newest_note
from tests.commands.program import done, refused, run

SMALL = "--model=tests.training.small_models."
MODEL = f"{SMALL}PlainPoints"
COSINE = ["--learning_rate_schedule=cosine", "--warmup_steps=2", "--learning_rate=0.02"]


def steps_of(logdir):
    """The last record of each step."""
    lines = [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


@pytest.mark.slow
def test_a_schedule_is_kept_and_a_change_is_told(tmp_path):
    logdir = f"--logdir={tmp_path}"
    flags = ["--optimizer=adamw", "--weight_decay=0.2", "--clip_gradient_norm=0.5", *COSINE]
    out = done("train", MODEL, *flags, "--steps=6", logdir)
    wanted = [0.0, 0.01, *(0.01 * (1 + math.cos(math.pi * i / 4)) for i in range(4))]
    steps = steps_of(tmp_path)
    assert [step["learning_rate"] for step in steps] == pytest.approx(wanted, abs=1e-8)
    assert all(step["gradient_norm"] > 0 for step in steps)
    page = (tmp_path / "report.html").read_text()
    assert "gradient_norm" in page
    config = (tmp_path / "config.toml").read_text().splitlines()
    assert {'optimizer = "adamw"', 'learning_rate_schedule = "cosine"', "decay_steps = 6"} <= {
        *config
    }
    # The fall does not begin anew with more steps.
    told = refused("train", "--steps=8", logdir)
    assert "--decay_steps=6: the learning rate is 0 from that step on, up to --steps=8" in told
    out = done("train", "--steps=9", "--decay_steps=12", "--weight_decay=0.1", logdir)
    assert "changed since the checkpoint: task.train.learner.lr_schedule" in out
    assert "task.train.learner.optimizer.weight_decay 0.2 -> 0.1" in out
    assert steps_of(tmp_path)[-1]["learning_rate"] > 0
    # The end that was saved is not of this schedule.
    code, out, err = run("train", "--steps=10", "--learning_rate_schedule=constant", logdir)
    assert code == 0, err
    assert "--warmup_steps=2" in out and "decay_steps" not in out.splitlines()[0]
    assert steps_of(tmp_path)[-1]["learning_rate"] == pytest.approx(0.02)


@pytest.mark.slow
def test_the_models_own_number_of_steps_ends_the_fall(tmp_path):
    logdir = f"--logdir={tmp_path}"
    done("train", f"{SMALL}LimitedPoints", "--learning_rate_schedule=linear", logdir)
    steps = steps_of(tmp_path)
    assert (
        len(steps) != 300
        and f"decay_steps = {len(steps)}" in (tmp_path / "config.toml").read_text()
    )
    assert steps[-1]["learning_rate"] == pytest.approx(0.1 / len(steps))


@pytest.mark.slow
def test_another_optimizer_than_the_checkpoints_is_refused(tmp_path):
    logdir = f"--logdir={tmp_path}"
    done("train", f"{SMALL}ShortStagedPoints", "--optimizer=adamw", "--steps=1", logdir)
    told = refused("train", "--optimizer=muon", "--steps=2", logdir)
    assert "ckpt-1 was trained by AdamW, not Muon: " in told
    assert "ckpt-1 has no 'points/cell_000/dense/b/var/Muon'" in told


@pytest.mark.slow
def test_flags_go_over_attributes_of_the_class(tmp_path):
    flags = ["--optimizer=muon", "--steps=4", "--final_learning_rate=0.5", f"--logdir={tmp_path}"]
    done("train", f"{SMALL}TunedPoints", *flags)
    note = newest_note(str(tmp_path))[1]
    assert note["settings"]["task.train.learner.optimizer.weight_decay"] == "0.3"
    assert "Muon" in note["settings"]["task.train.learner.optimizer.cls"]
    assert note["flags"]["decay_steps"] == 4
    wanted = [0.0, 0.5, 1.0, 0.75]
    first = 0.1
    assert [step["learning_rate"] for step in steps_of(tmp_path)] == pytest.approx(
        [first * factor for factor in wanted]
    )
