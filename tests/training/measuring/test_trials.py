"""Trials of plans, of steps that only say what they take."""

import math

import pytest
import tensorflow as tf

from pipemesh.errors import PlanError
from pipemesh.plan import Plan
from pipemesh.training.measuring import trials


class Said:
    """Takes as many seconds as its plan has microbatches; three of them it cannot have."""

    def __init__(self, plan, batch):
        if plan.num_microbatches == 3:
            raise PlanError(f"{batch} rows are not three microbatches")
        self._plan, self.cpu = plan, 0.0

    def run(self):
        return float(self._plan.num_microbatches)


def test_a_plan_that_cannot_be_had_takes_endless_and_the_others_are_tried(monkeypatch):
    monkeypatch.setattr(trials, "TimedStep", Said)
    plans, told = [Plan(num_microbatches=n) for n in (4, 3, 2)], []
    assert trials.seconds_of(lambda plan: plan, 8, plans, told.append) == [4.0, math.inf, 2.0]
    assert told[1].startswith("a trial of 'mesh=layers:1 num_microbatches=3'")
    assert told[2].endswith("cannot be had: 8 rows are not three microbatches")
    with pytest.raises(PlanError, match="8 rows are not"):
        trials.seconds_of(lambda plan: plan, 8, plans[1:2])


def test_a_plan_that_needs_more_memory_than_there_is_is_left_out(monkeypatch):
    class Large(Said):
        def __init__(self, plan, batch):
            if plan.num_microbatches == 1:
                raise tf.errors.ResourceExhaustedError(None, None, "OOM")
            super().__init__(plan, batch)

    monkeypatch.setattr(trials, "TimedStep", Large)
    plans, told = [Plan(num_microbatches=n) for n in (1, 2)], []
    assert trials.seconds_of(lambda plan: plan, 8, plans, told.append) == [math.inf, 2.0]
    assert told[1].endswith("needs more memory than there is")
