"""Steps whose gradients overflow float16 while the scale of the loss is being found."""

import json

import numpy as np
import pytest

from pipemesh.report import read
from pipemesh.training import Loop, Options, Trainer
from pipemesh.training.measuring.timed_step import TimedStep
from pipemesh.training.registered import RegisteredModel
from tests.training.small_models import StagedPoints


def made(logdir, **changes):
    values = {"num_microbatches": "4", "schedule": "1f1b", "compute_dtype": "float16"}
    options = Options(logdir=str(logdir), steps=20, save_every=20, **changes)
    return Trainer(RegisteredModel(StagedPoints(), "Points", values), options), options


@pytest.mark.slow
def test_overflowed_steps_move_nothing_and_are_told(eagerly, tmp_path, capsys):
    """Adam's powers were moved by them, and nothing was said; ten in a row are no failure."""
    trainer, options = made(tmp_path, on_nonfinite="stop")
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
def test_steps_that_overflow_are_not_timed(eagerly, tmp_path):
    trainer, _ = made(tmp_path)
    trainer.trained._scales[0].variables[0].assign(2.0**20)
    _, found = trainer.trace_schedule()
    assert len(found) == 5 and trainer.step == 6 + trainer.skipped and trainer.skipped > 1
    step = TimedStep(trainer.subject, trainer.batch)
    assert int(step.trained.step.numpy()) == 1
