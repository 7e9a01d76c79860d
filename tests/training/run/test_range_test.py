"""Which learning rates a model learns with."""

import math
import os
import random

import numpy as np
import pytest

from pipemesh.errors import TrainingError
from pipemesh.training import Options, Trainer
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run.range_test import Curve, RangeTest
from tests.training import small_models

STEPS = 40


def range_test(logdir, name="PlainPoints", restore=None, **attributes):
    """The test, and its trainer."""
    config = getattr(small_models, name)()
    vars(config).update(attributes)
    options = Options(logdir=str(logdir), steps=50, find_learning_rate=STEPS)
    trainer = Trainer(RegisteredModel(config, name), options, restore)
    return RangeTest(trainer, options), trainer


def rows_of(logdir):
    return np.genfromtxt(logdir / "learning_rates.csv", delimiter=",", names=True)


def test_a_curve_is_read_through_its_noise():
    rng = random.Random(0)
    curve = Curve()
    for number in range(100):
        rate = 1e-7 * 10 ** (8 * number / 99)
        # Falls around 1e-3, rises from about 0.3 on.
        curve.add(rate, 8 - 2 / (1 + 1e-3 / rate) + (rate / 0.3) ** 2 + rng.gauss(0, 0.02))
        if curve.has_risen:
            break
    # At 0.7 it is back to where it was.
    assert 0.7 < rate < 1.5
    assert 3e-4 < curve.fastest < curve.suggested < curve.lowest < 0.3


def test_a_curve_that_never_falls_suggests_the_lowest_rate_there_was():
    curve = Curve()
    for number in range(20):
        curve.add(1e-7 * 2**number, 1.0 + number)
    assert curve.fastest == curve.lowest == 1e-7
    assert math.isfinite(curve.suggested)


def test_rates_grow_and_nothing_is_saved(eagerly, tmp_path, capsys):
    test, trainer = range_test(tmp_path)
    assert test.run() == 0
    assert os.listdir(tmp_path) == ["learning_rates.csv"]
    rows = rows_of(tmp_path)
    count = len(rows["loss"])
    assert 20 < count == trainer.step <= STEPS
    np.testing.assert_allclose(
        rows["learning_rate"], 1e-7 * 10 ** (8 * np.arange(count) / (STEPS - 1)), rtol=1e-4
    )
    told = capsys.readouterr().out
    # The schedule of the model is constant.
    assert "With p.train.learner.learning_rate=0.1 the model's own go up to 1.0e-01" in told


@pytest.mark.parametrize("name", ["PlainPoints", "StagedPoints"])
def test_a_step_moves_the_weights_by_its_rate(eagerly, tmp_path, name):
    """The losses are those of a training with the rates, one after the other."""
    test, trainer = range_test(tmp_path, name)
    test.run()
    task = trainer.subject.task()
    # The rates of the last steps change most.
    rates = [float(rate) for rate in rows_of(tmp_path)["learning_rate"]]
    task.train.learner.learning_rate = 1.0
    task.train.learner.lr_schedule = small_models.ByStep.Params().Set(values=rates)
    trainer.subject.task = task.Copy
    plain = Trainer(trainer.subject, Options(logdir=str(tmp_path), steps=50))
    losses = [plain.train_step()["loss"] for _ in rates]
    np.testing.assert_allclose(rows_of(tmp_path)["loss"], losses, rtol=1e-4)


def test_it_begins_where_a_training_is(eagerly, tmp_path):
    subject = RegisteredModel(small_models.PlainPoints(), "points")
    before = Trainer(subject, Options(logdir=str(tmp_path), steps=50))
    for _ in range(3):
        before.train_step()
    path = before.save()
    wanted = before.train_step()["loss"]
    test, trainer = range_test(tmp_path, restore=path)
    assert trainer.step == 3
    trainer._batches.go_to(path, 0)
    test.run()
    rows = rows_of(tmp_path)
    assert rows["learning_rate"][0] == pytest.approx(1e-7)
    np.testing.assert_allclose(rows["loss"][0], wanted, rtol=1e-5)
    assert [name for name in os.listdir(tmp_path) if name.endswith(".index")] == ["ckpt-3.index"]


def test_a_loss_that_is_not_finite_ends_it(eagerly, tmp_path, capsys):
    test, _ = range_test(tmp_path, "SpoiledPoints")
    test.run()
    assert len(rows_of(tmp_path)) == 3
    assert "and is not finite beyond" in capsys.readouterr().out
    test, _ = range_test(tmp_path, "SpoiledPoints", BAD=0)
    with pytest.raises(TrainingError, match=r"^step 1: .*with a learning rate of next to nothing"):
        test.run()
