"""The largest learning rate of a task's own schedule."""

import pytest
from lingvo.core import base_model, learner, schedule

from pipemesh.training.ramp import Ramp, peak_rate, ramped


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
    for steps, peak in [(50, 0.25), (100, 0.5), (10_000, 0.5)]:
        assert peak_rate(params, steps) == (0.5, pytest.approx(peak))
    assert peak_rate(params, 0) == (0.5, pytest.approx(0.0))


@pytest.mark.parametrize("of_learner", [True, False])
def test_a_ramp_takes_the_schedules_place_in_a_copy(eagerly, of_learner):
    params = task(schedule.Constant.Params(), of_learner)
    copy = ramped(params, 7, 30)
    assert peak_rate(params, 10) == (0.5, 0.5)
    assert peak_rate(copy, 36) == (1.0, pytest.approx(10.0, rel=1e-5))
    rates = copy.train.learner or copy.train
    assert rates.lr_schedule.cls is Ramp and rates.lr_schedule.first_step == 7
