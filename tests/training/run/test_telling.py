"""What a training tells: to people, to programs, into its record and its page."""

import json
import os
import signal

import pytest

from pipemesh.errors import TrainingError
from pipemesh.report import read
from pipemesh.training import Loop, Options, Trainer
from pipemesh.training.registered import RegisteredModel
from tests.commands.program import done, refused, run
from tests.training import small_models

STAGED = "--model=tests.training.small_models.StagedPoints"


def trained(logdir, steps=4, name="PlainPoints", restore=None, stop=None, **changes):
    """The exit code of a training in this process."""
    logdir.mkdir(exist_ok=True)
    values = {"save_every": 2, "eval_every": 2, "eval_batches": 2} | changes
    options = Options(logdir=str(logdir), steps=steps, given={"seed": 3}, **values)
    subject = RegisteredModel(getattr(small_models, name)(), name)
    trainer = Trainer(subject, options, restore and str(restore), keeps_place=True)
    if stop:
        real = trainer.train_step

        def train_step():
            result = real()
            if trainer.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        trainer.train_step = train_step
    return Loop(trainer, options).run()


def events(logdir):
    return [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]


def test_a_training_is_recorded_from_its_beginning_to_its_end(eagerly, tmp_path, capsys):
    assert trained(tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [f"report: {tmp_path}/report.html", f"checkpoint: {tmp_path}/ckpt-4"]
    told = events(tmp_path)
    kinds = [event["event"] for event in told]
    assert (kinds[0], kinds[-1], kinds.count("step")) == ("begin", "end", 4)
    assert told[0]["flags"] == {"seed": 3} and told[0]["name"] == "PlainPoints"
    run = read(str(tmp_path))
    assert run.state == "done, at step 4" and run.unread == 0
    assert [step for step, _ in run.heldout["loss"]] == [2]
    assert [step for step, _ in run.final["accuracy"]] == [4]
    assert list(run.told["checkpoint"]) == [2, 4]
    assert run.told["checkpoint"][4]["path"] == f"{tmp_path}/ckpt-4"
    assert run.fact("measured", "peak_memory") > 1e6
    for line in out:
        if line.startswith("step 2: held out loss "):
            loss = float(line.split()[5].rstrip(","))
            assert run.heldout["loss"] == [(2, pytest.approx(loss, abs=1e-3))]
            break
    else:
        raise AssertionError(out)
    assert "done, at step 4" in (tmp_path / "report.html").read_text()


def test_for_programs_standard_output_has_the_record_and_nothing_else(eagerly, tmp_path, capsys):
    assert trained(tmp_path, log_format="json") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == events(tmp_path)
    assert "step 2: held out " in err and f"checkpoint: {tmp_path}/ckpt-4" in err
    # Only as long as it trains.
    print("text")
    assert capsys.readouterr().out == "text\n"


def test_a_training_that_is_stopped_and_goes_on_has_the_curves_of_one_that_is_not(
    eagerly, tmp_path, capsys
):
    assert trained(tmp_path / "whole", 6) == 0
    assert trained(tmp_path / "run", 6, stop=3) == 128 + signal.SIGTERM
    stopped = read(str(tmp_path / "run"))
    assert stopped.state == "stopped by SIGTERM, at step 3"
    assert list(stopped.told["checkpoint"]) == [2, 3]
    assert "stopped by SIGTERM" in (tmp_path / "run" / "report.html").read_text()
    # From a checkpoint before: what is beyond it counts no more.
    assert trained(tmp_path / "run", 6, restore=tmp_path / "run" / "ckpt-2") == 0
    run, whole = read(str(tmp_path / "run")), read(str(tmp_path / "whole"))
    assert run.resumed == [2] and run.state == "done, at step 6"
    for name in ("loss", "accuracy", "learning_rate"):
        assert run.train[name] == whole.train[name]
    assert (run.heldout, run.final) == (whole.heldout, whole.final)


def test_steps_that_are_skipped_are_told_each(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 6, "SpoiledPoints") == 0
    run = read(str(tmp_path))
    (step,) = run.told["skipped"]
    assert "not finite" in run.told["skipped"][step]["why"]
    assert [number for number, _ in run.train["loss"]] == sorted({*range(1, 7)} - {step})


def test_how_it_failed_is_told(eagerly, tmp_path, capsys):
    with pytest.raises(TrainingError):
        trained(tmp_path, 6, "SpoiledPoints", on_nonfinite="stop", log_format="json")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["event"] == "end" and not last["is_done"] and "not finite" in last["reason"]


def test_a_record_and_a_page_that_cannot_be_written_end_nothing(eagerly, tmp_path, capsys):
    (tmp_path / "record.jsonl").mkdir()
    assert trained(tmp_path) == 0
    err = capsys.readouterr().err
    assert err.count("record.jsonl cannot be written (Is a directory); training goes on") == 1
    assert err.count("the report cannot be written (") == 1
    (tmp_path / "record.jsonl").rmdir()
    (tmp_path / "report.html").mkdir()
    assert trained(tmp_path, 5, restore=tmp_path / "ckpt-4") == 0
    out, err = capsys.readouterr()
    assert err.count("the report cannot be written (") == 1 and "report: " not in out
    # Steps before are unknown.
    assert [step for step, _ in read(str(tmp_path)).train["loss"]] == [5]


@pytest.mark.slow
def test_the_command_tells_programs_of_a_schedule(tmp_path):
    flags = ["train", STAGED, f"--logdir={tmp_path}", "--steps=2"]
    code, out, err = run(*flags, "--log_format=json", "--trace_schedule")
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert told == events(tmp_path)
    assert [event["event"] for event in told].count("schedule") == 1
    found = read(str(tmp_path))
    assert found.step == 2 and found.state == "done, at step 2"
    measured = found.measured()
    assert measured.makespan > 0 and len(measured.starts) == 2
    assert "Where the difference came from" in (tmp_path / "report.html").read_text()
    # It is none of the flags that a training was begun with.
    assert "log_format" not in (tmp_path / "config.toml").read_text()
    assert "checkpoint: " in done("train", f"--logdir={tmp_path}", "--steps=3")


@pytest.mark.slow
def test_programs_are_told_of_training_alone(tmp_path):
    words = [STAGED, f"--logdir={tmp_path}", "--log_format=json"]
    line = refused("train", *words, "--find_learning_rate=60")
    assert "--log_format=json is for training; leave it or --find_learning_rate out" in line
    assert "--log_format is for training; leave it out" in refused("evaluate", *words)
