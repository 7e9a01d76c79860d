"""The loop of a run: what it tells of its steps, expected ones, spikes and overflowed ones."""

import dataclasses
import json
import math
import os
import random

import numpy as np
import pytest

from pipemesh.commands.training_flags import newest_note
from pipemesh.errors import RescaledError
from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import figures_of_costs
from pipemesh.recurrent import Placement
from pipemesh.report import read
from pipemesh.report.plan_changes import Basis, basis_of
from pipemesh.training import Options, Trainer
from pipemesh.training.measuring.timed_step import TimedStep
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run.loop import Loop, Spikes, expected
from tests.commands.program import run
from tests.training import small_models
from tests.training.small_models import PlannedPoints, ShortStagedPoints, StagedPoints


def told_spikes(losses):
    spikes = Spikes()
    return [step for step, loss in enumerate(losses) if spikes.add(loss)]


def test_a_spike_is_told_and_noise_is_not():
    rng = random.Random(0)
    # As training goes: down, in noise.
    losses = [3 + 5 * math.exp(-step / 80) + rng.gauss(0, 0.1) for step in range(1000)]
    assert told_spikes(losses) == []
    # While it falls steeply, distances from the mean are large: nothing is told too early.
    for step in (400, 999):
        spiked = list(losses)
        spiked[step] += 4
        assert told_spikes(spiked) == [step]
    assert told_spikes([9.0] * 100 + [1.0] * 100) == [], "it falls"
    assert told_spikes([1.0] * 100 + [1.0001] + [1.0] * 100) == [], "noise of a constant"
    # A loss that stays high is reported until it is usual.
    found = told_spikes([2.0 + 0.01 * (step % 2) for step in range(200)] + [4.0] * 200)
    assert found == list(range(200, 200 + len(found))) and 0 < len(found) < 20


PLANNED = "--model=tests.training.small_models.PlannedPoints"


def figures(layers=3):
    costs = [
        LayerCost(
            1e-3, backward=2e-3, parameter_bytes=100.0, activation_bytes=10.0, boundary_bytes=1.0
        )
    ] * layers
    return Figures(tuple(figures_of_costs(costs, 4)), action=1e-4, batch=8, about="three layers")


def test_more_than_the_measured_peak_is_no_mfu(eagerly, tmp_path, capsys, monkeypatch):
    """Other programs ran when the peak was measured."""
    options = Options(logdir=str(tmp_path), steps=0)
    loop = Loop(Trainer(RegisteredModel(small_models.PlainPoints(), "Points"), options), options)
    loop._flops = loop._peak = 1e9

    def told(seconds):
        """The report on a step of 1 GFLOP on devices of 1 GFLOP/s."""
        loop._measured_steps, loop._seconds, loop._rate = 0, 0.0, 1.0
        loop._measured(1, seconds)
        last = (tmp_path / "record.jsonl").read_text().splitlines()[-1]
        return json.loads(last), capsys.readouterr().out

    found, text = told(2.0)
    assert found["mfu"] == 0.5 and "MFU 50.0% of 1 GFLOP/s" in text
    found, text = told(0.5)
    assert "mfu" not in found
    assert "MFU not known: more than the 1 GFLOP/s that were measured at the start" in text
    # Memory of another process's GPUs is not known.
    monkeypatch.setattr("pipemesh.training.run.loop.peak_memory", lambda devices: 0)
    found, text = told(2.0)
    assert found["peak_memory"] == 0 and text.endswith("of 1 GFLOP/s\n")


@pytest.mark.slow
def test_measured_figures_predict_a_step(eagerly, tmp_path, capsys):
    options = Options(logdir=str(tmp_path), steps=2, eval_batches=1, device_memory=1e9)
    trainer = Trainer(RegisteredModel(PlannedPoints(), "Points", {"mesh": "layers:1"}), options)
    loop = Loop(trainer, options)
    assert loop.run() == 0
    found, out = read(str(tmp_path)).last["forecast"], capsys.readouterr().out
    # Without figures nobody asked for a prediction.
    assert "predicted" not in found and "was not measured" in found["unpredicted"]
    assert (found["rows"], found["device_memory"]) == (8, 1e9)
    assert found["cuts"][0] == 0 and found["cores"] == os.cpu_count()
    assert "predicted:" not in out
    count = len(small_models.stack_of(1)[0].sub)
    (tmp_path / "figures.json").write_text(figures(count).to_json())
    loop._report()
    found, out = read(str(tmp_path)).last["forecast"], capsys.readouterr().out
    plan = Plan("layers:1", num_microbatches=2, boundaries=tuple(found["cuts"]))
    ahead = predict(plan, figures(count), 8)
    assert found["predicted"]["seconds"] == pytest.approx(ahead.seconds)
    assert found["predicted"]["parts"] == pytest.approx(ahead.parts)
    assert found["predicted"]["memory"] == list(ahead.memory)
    assert found["predicted"]["about"] == "three layers" and found["device_memory"] == 1e9
    there = Figures.from_json(json.dumps(found["figures"]), "the record")
    assert there == figures(count)
    assert f"predicted: {1e3 * ahead.seconds:.4g} ms a step by what was measured" in out
    # Figures of another model.
    path = tmp_path / "of_another.json"
    path.write_text(figures(50).to_json())
    found, out = expected(
        trainer, dataclasses.replace(options, figures=str(path), device_memory=None)
    )
    assert found["device_memory"] is None
    assert "there are 50 layers" in found["unpredicted"] and "predicted" not in found
    assert out.startswith("seconds are not predicted: boundaries end at")
    trainer = Trainer(RegisteredModel(small_models.PlainPoints(), "Points"), options)
    assert expected(trainer, options) == ({}, ""), "without a pipeline"


_OF_A_CALL = ("--log_format=json", "--trace_schedule")


@pytest.mark.slow
def test_a_timed_step_suggests_changes(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(figures(len(small_models.stack_of(1)[0].sub)).to_json())
    logdir = tmp_path / "run"
    words = ["train", PLANNED, f"--figures={path}", f"--logdir={logdir}", "--steps=3"]
    code, out, err = run(*words, *_OF_A_CALL)
    assert code == 0, err
    assert f"checkpoint: {logdir}/ckpt-3" in err and "held out " in err
    told = [json.loads(line) for line in out.splitlines()]
    record = (logdir / "record.jsonl").read_text().splitlines()
    assert told == [json.loads(line) for line in record]
    assert [event["event"] for event in told].count("schedule") == 1
    # They are none of the flags that a training was begun with, and goes on with.
    flags = newest_note(str(logdir))[1]["flags"]
    assert {"model", "steps"} <= flags.keys() and not {"log_format", "trace_schedule"} & {*flags}
    assert not any(flag[2:12] in (logdir / "config.toml").read_text() for flag in _OF_A_CALL)
    found = read(str(logdir))
    assert found.step == 3 and found.state == "done, at step 3"
    measured = found.measured()
    assert measured.makespan > 0 and len(measured.starts) == 2
    assert found.fact("schedule", "seconds") > 1e-3 * measured.makespan
    # That of the first step, which builds the graph, is none.
    assert [step for step, _ in found.train["seconds"]] == [2, 3]
    basis = basis_of(found)
    assert isinstance(basis, Basis) and basis.knows_rows
    text = (logdir / "report.html").read_text()
    assert "Predicted from measurements of the layers (three layers)." in text
    assert "changes were simulated with the durations of the timed step" in text
    assert "Where the difference came from" in text


def made(logdir, config=ShortStagedPoints, number=2, strict_devices=False, **changes):
    values = {"num_microbatches": str(number), "schedule": "1f1b", "compute_dtype": "float16"}
    options = Options(logdir=str(logdir), steps=20, save_every=20, **changes)
    model = RegisteredModel(config(), "Points", values, strict_devices=strict_devices)
    return Trainer(model, options), options


@pytest.mark.slow
def test_overflowed_steps_move_nothing_and_are_told(eagerly, tmp_path, capsys):
    """Adam's powers were moved by them, and nothing was said; ten in a row are no failure."""
    # Its first steps overflow one after the other.
    trainer, options = made(tmp_path, StagedPoints, 4, on_nonfinite="stop", steps_per_call=4)
    (scale,) = trainer.trained._scales
    scale.variables[0].assign(2.0**28)
    before = {name: v.numpy() for name, v in trainer.trained.state().items()}
    seen, real = [], trainer.skip

    def skip():
        real()
        seen.append({name: v.numpy() for name, v in trainer.trained.state().items()})

    trainer.skip = skip
    assert Loop(trainer, options).run() == 0
    overflowed = len(seen)
    assert 10 < overflowed < 20
    moved = {
        name for state in seen for name in state if not np.array_equal(state[name], before[name])
    }
    assert moved == {
        "global_step",
        "skipped_steps",
        "points/stack/finite/var",
        "points/stack/loss_scale/var",
    }
    state = {name: v.numpy() for name, v in trainer.trained.state().items()}
    (power,) = (value for name, value in state.items() if "beta1_power" in name)
    np.testing.assert_allclose(power, 0.9 ** (1 + 20 - overflowed), rtol=1e-5)
    assert state["skipped_steps"] == overflowed and float(scale.value) == 2.0 ** (28 - overflowed)
    told = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    why = [event["why"] for event in told if event["event"] == "skipped"]
    assert len(why) == overflowed
    text = "gradients of 2.68435e+08 times the loss overflow float16, 1.34218e+08 times from now on"
    assert why[0] == text
    err = capsys.readouterr().err
    assert f"step 1: {text}; skipped, its weights are those before (1 step skipped so far)" in err
    assert err.count("overflow float16") == overflowed
    run = read(str(tmp_path))
    assert len(run.told["skipped"]) == overflowed


@pytest.mark.slow
def test_devices_are_checked_if_the_first_step_overflows(eagerly, tmp_path, monkeypatch):
    """The check took the first good step, of which TensorFlow reports no graph any more."""
    checked = []
    monkeypatch.setattr(Placement, "check", lambda placement: checked.append(placement))
    trainer, _ = made(tmp_path, strict_devices=True)
    trainer.trained._scales[0].variables[0].assign(2.0**28)
    with pytest.raises(RescaledError):
        trainer.train_step()
    (placement,) = checked
    assert [list(counts) for counts in placement.found] == [["CPU:0"], ["CPU:1"]]
    trainer.trained._scales[0].variables[0].assign(1.0)
    assert np.isfinite(trainer.train_step()["loss"])
    assert len(checked) == 1


@pytest.mark.slow
def test_devices_of_several_steps_in_a_call_are_checked(eagerly, tmp_path, monkeypatch):
    """The first call had one step, whose graph was the only one that was checked."""
    checked = []
    monkeypatch.setattr(Placement, "check", lambda placement: checked.append(placement))
    trainer, _ = made(tmp_path, strict_devices=True, steps_per_call=3)
    trainer.trained._scales[0].variables[0].assign(1.0)
    for most in (3, 2, 1, 1):
        assert len(trainer.train_steps(most)) == most
    assert len(checked) == 2
    for placement in checked:
        assert [list(counts) for counts in placement.found] == [["CPU:0"], ["CPU:1"]]


@pytest.mark.slow
def test_steps_that_overflow_are_not_timed(eagerly, tmp_path):
    trainer, _ = made(tmp_path)
    trainer.trained._scales[0].variables[0].assign(2.0**20)
    _, found = trainer.trace_schedule()
    assert len(found) == 5 and trainer.step == 6 + trainer.skipped and trainer.skipped > 1
    step = TimedStep(trainer.subject, trainer.batch)
    assert int(step.trained.step.numpy()) == 1
