"""The range test of learning rates."""

import math
import os
import random
import signal

import numpy as np
import pytest

from pipemesh.errors import TrainingError
from pipemesh.training import Options, Trainer
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run.range_test import Curve, RangeTest
from tests.pairwise import in_turn
from tests.training import small_models

STEPS = 60


def range_test(logdir, name="PlainPoints", restore=None, on_nonfinite="skip", **attributes):
    """The test, and its trainer."""
    config = getattr(small_models, name)()
    vars(config).update(attributes)
    options = Options(
        logdir=str(logdir), steps=50, find_learning_rate=STEPS, on_nonfinite=on_nonfinite
    )
    trainer = Trainer(RegisteredModel(config, name), options, restore)
    return RangeTest(trainer, options), trainer


def rows_of(logdir):
    return np.genfromtxt(logdir / "learning_rates.csv", delimiter=",", names=True)


def drawn(steps, noise, seed, begin=8.0):
    """The curve of a loss that falls by a fourth around 1e-3, and rises from about 0.3 on."""
    rng = random.Random(seed)
    curve = Curve(steps)
    rate = 0.0
    for number in range(steps):
        # That of the weights, which the rate before has moved.
        loss = begin * (0.75 + 0.25 / (1 + rate / 1e-3)) + (rate / 0.3) ** 2
        rate = 1e-7 * 10 ** (8 * number / (steps - 1))
        curve.add(rate, loss + rng.gauss(0, noise))
        if curve.has_risen:
            break
    return curve


@pytest.mark.parametrize(("steps", "noise"), in_turn([50, 100, 300], [0.2, 0.05, 0.0]))
def test_a_curve_is_read_through_its_noise(steps, noise):
    for seed in range(12):
        curve = drawn(steps, noise, seed)
        assert curve.has_risen and curve.has_fallen
        # The loss is back where it was at 0.4.
        assert 0.4 < curve.rates[-1] < 3
        assert 1e-4 < curve.fastest <= curve.suggested <= curve.lowest < 0.3, seed
        assert 4e-4 < curve.suggested < 0.1, seed


def test_a_loss_that_only_varies_suggests_nothing():
    """As that of a model that has learned what there is."""
    for seed in range(60):
        rng = random.Random(seed)
        curve = Curve(100)
        for number in range(70):
            curve.add(1e-7 * 10 ** (8 * number / 99), 0.1 * math.exp(rng.gauss(0, 0.5)))
            assert not curve.has_risen, seed
        assert not curve.has_fallen, seed


def test_advice_compares_with_the_models_rates(eagerly, tmp_path):
    test, _ = range_test(tmp_path)
    told = test._advice(drawn(100, 0.0, 0), "is well above it")
    assert told[1].startswith("suggested: learning rates up to ")
    # The schedule is constant.
    assert told[2].startswith(
        "with p.train.learner.learning_rate=0.1 the model's own go up to 1.0e-01 within 50 steps; "
    )
    flat = Curve(100)
    for number in range(100):
        flat.add(1e-7 * 1.2**number, 1.0)
    assert test._advice(flat, "is 1 at the highest") == [
        "the loss did not fall by more than it varies, and is 1 at the highest; there is nothing "
        "to suggest"
    ]


def test_a_step_moves_the_weights_by_its_rate(eagerly, tmp_path, capsys):
    """The losses are those of a training with the rates, one after the other."""
    test, trainer = range_test(tmp_path)
    assert test.run() == 0
    assert os.listdir(tmp_path) == ["learning_rates.csv"], "nothing is saved"
    rows = rows_of(tmp_path)
    count = len(rows["loss"])
    assert 20 < count == trainer.step <= STEPS
    np.testing.assert_allclose(
        rows["learning_rate"], 1e-7 * 10 ** (8 * np.arange(count) / (STEPS - 1)), rtol=1e-4
    )
    assert f"{count} steps from step 0 on" in capsys.readouterr().out
    task = trainer.subject.task()
    # The rates of the last steps change most.
    rates = [float(rate) for rate in rows_of(tmp_path)["learning_rate"]]
    task.train.learner.learning_rate = 1.0
    task.train.learner.lr_schedule = small_models.ByStep.Params().Set(values=rates)
    trainer.subject.task = task.Copy
    plain = Trainer(trainer.subject, Options(logdir=str(tmp_path), steps=50))
    losses = [plain.train_step()["loss"] for _ in rates]
    np.testing.assert_allclose(rows_of(tmp_path)["loss"], losses, rtol=1e-4)


def test_it_begins_at_the_restored_step(eagerly, tmp_path):
    """The newest checkpoint is damaged, so it is the one before."""
    subject = RegisteredModel(small_models.PlainPoints(), "points")
    before = Trainer(subject, Options(logdir=str(tmp_path), steps=50))
    for _ in range(3):
        before.train_step()
    path = before.save()
    wanted = before.train_step()["loss"]
    before.train_step()
    newest = before.save()
    with open(f"{newest}.data-00000-of-00001", "r+b") as file:
        file.seek(200)
        file.write(b"damaged")
    test, trainer = range_test(tmp_path, restore=newest)
    assert trainer.step == 3
    trainer.batches.go_to(path, 0)
    test.run()
    rows = rows_of(tmp_path)
    assert rows["learning_rate"][0] == pytest.approx(1e-7)
    assert rows["learning_rate"][-1] > 1e-3
    np.testing.assert_allclose(rows["loss"][0], wanted, rtol=1e-5)
    assert (tmp_path / "ckpt-3.index").exists()


def test_a_loss_that_is_not_finite_ends_it(eagerly, tmp_path, capsys):
    test, trainer = range_test(tmp_path, "SpoiledPoints")
    test.run()
    assert len(rows_of(tmp_path)) > 20 and trainer.skipped == 1, "one is no matter of rates"
    test, _ = range_test(tmp_path, "SpoiledPoints", on_nonfinite="stop")
    test.run()
    assert len(rows_of(tmp_path)) == 3
    assert "and is not finite beyond" in capsys.readouterr().out
    test, _ = range_test(tmp_path, "SpoiledPoints", on_nonfinite="stop", BAD=0)
    with pytest.raises(TrainingError, match=r"^step 1: .*with a learning rate of next to nothing"):
        test.run()


def test_a_signal_ends_it_with_a_report(eagerly, tmp_path, capsys):
    test, trainer = range_test(tmp_path)
    step = trainer.train_step

    def interrupted():
        if trainer.step == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    trainer.train_step = interrupted
    assert test.run() == 128 + signal.SIGINT
    assert len(rows_of(tmp_path)) == 31
    assert "31 steps from step 0 on" in capsys.readouterr().out


def test_a_schedule_with_variables_is_for_new_weights(eagerly, tmp_path):
    subject = RegisteredModel(small_models.PlainPoints(), "points")
    before = Trainer(subject, Options(logdir=str(tmp_path), steps=50))
    before.train_step()
    path = before.save()
    task = subject.task()
    task.train.learner.lr_schedule = small_models.Remembering.Params()
    subject.task = task.Copy
    options = Options(logdir=str(tmp_path), steps=50, find_learning_rate=STEPS)
    with pytest.raises(TrainingError, match="learning rate has variables, which the range test"):
        Trainer(subject, options, path)
    assert RangeTest(Trainer(subject, options), options).run() == 0
