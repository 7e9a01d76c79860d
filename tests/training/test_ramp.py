"""The largest learning rate of a task's own schedule."""

import pytest
from lingvo.core import base_model, learner, schedule

from pipemesh.training.ramp import Ramp, has_state, peak_rate, ramped
from tests.training import small_models


def task(own, of_learner=True):
    params = base_model.BaseTask.Params().Set(name="task")
    rates = learner.Learner.Params().Set(name="loss") if of_learner else params.train
    rates.Set(learning_rate=0.5, lr_schedule=own)
    if of_learner:
        params.train.learner = rates
    return params


@pytest.mark.parametrize("of_learner", [True, False])
def test_the_peak_is_that_within_the_steps(eagerly, of_learner):
    own = schedule.PolynomialSchedule.Params().Set(start=(0, 0.0), limit=(100, 1.0))
    params = task(own, of_learner)
    name = "p.train.learner.learning_rate" if of_learner else "p.train.learning_rate"
    for steps, peak in [(51, 0.25), (101, 0.5), (10_000, 0.5), (0, 0.0)]:
        assert peak_rate(params, steps) == (name, 0.5, pytest.approx(peak))


@pytest.mark.parametrize(("warmup", "steps"), [(100, 100_000), (1000, 1_000_000), (7, 300)])
def test_the_peak_of_a_short_warm_up_is_found(eagerly, warmup, steps):
    own = schedule.TransformerSchedule.Params().Set(warmup_steps=warmup, model_dim=512)
    found = peak_rate(task(own), steps)
    assert found[2] == pytest.approx(0.5 * (512 * warmup) ** -0.5, rel=0.05)


def test_a_schedule_that_does_not_say_has_no_peak(eagerly):
    assert peak_rate(task(small_models.Remembering.Params()), 10) is None
    assert has_state(task(small_models.Remembering.Params()))
    few = small_models.ByStep.Params().Set(values=[1.0, 3.0, 2.0])
    # All there are, and no other.
    assert peak_rate(task(few), 3)[2] == 1.5
    assert peak_rate(task(few), 4) is None and not has_state(task(few))


@pytest.mark.parametrize("of_learner", [True, False])
def test_a_ramp_takes_the_schedules_place_in_a_copy(eagerly, of_learner):
    params = task(schedule.Constant.Params(), of_learner)
    copy = ramped(params, 30)
    assert peak_rate(params, 10)[1:] == (0.5, 0.5)
    assert peak_rate(copy, 30)[1:] == (1.0, pytest.approx(10.0, rel=1e-5))
    assert (copy.train.learner or copy.train).lr_schedule.cls is Ramp
    params.train.learner = []
    assert ramped(params, 30).train.learner == []
