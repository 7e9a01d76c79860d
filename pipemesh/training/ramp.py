"""A learning rate that grows from step to step, and the largest rate of a schedule."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

import math
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import schedule

# The default lowest and highest rate of a ramp.
LOW, HIGH = 1e-7, 10.0
# Number of samples of a schedule, evenly by step and by its logarithm, and again around the
# maximum.
_PLACES = 200


class Ramp(schedule.BaseSchedule):
    """A schedule of learning rates that grow by the same factor each step.

    Attributes:
        first_step: the step with the lowest rate.

    Example:
        >>> from lingvo.core import py_utils
        >>> py_utils.SetEagerMode(True, test_mode=True)
        >>> ramp = Ramp.Params().Set(steps=3, low=0.01, high=1.0).Instantiate()
        >>> ramp.first_step = 10
        >>> [round(float(ramp.Value(tf.constant(step))), 4) for step in (10, 11, 12)]
        [0.01, 0.1, 1.0]
        >>> py_utils.SetEagerMode(False, test_mode=True)
    """

    first_step = 0

    @classmethod
    def Params(cls) -> Any:
        """Defines `steps`, `low` and `high`."""
        p = super().Params()
        p.Define("steps", 100, "How many there are; at least 2.")
        p.Define("low", LOW, "The lowest one.")
        p.Define("high", HIGH, "The highest one.")
        return p

    def Value(self, step: Any = None) -> tf.Tensor:
        """Returns the learning rate of a step; after the last step of the ramp the highest rate."""
        p = self.params
        now: Any = self.GetStep(step)
        share = tf.cast(now - self.first_step, p.dtype) / (p.steps - 1)
        share = tf.clip_by_value(share, 0.0, 1.0)
        return p.low * tf.exp(share * math.log(p.high / p.low))


def ramped(task: Any, steps: int) -> Any:
    """Returns a copy of a task's params with a `Ramp` as learning rate; unchanged without a
    learner.
    """
    copy = task.Copy()
    rates, _ = _rates_of(copy)
    if rates is not None:
        ramp = Ramp.Params().Set(name="ramp", steps=steps)
        rates.Set(learning_rate=1.0, lr_schedule=ramp)
    return copy


def has_state(task: Any) -> bool:
    """Returns whether the task's learning rate schedule has variables."""
    rates, _ = _rates_of(task)
    return rates is not None and bool(rates.lr_schedule.Instantiate().vars.Flatten())


def peak_rate(task: Any, steps: int) -> tuple[str, float, float] | None:
    """Returns the largest learning rate of a task's own schedule between step 0 and `steps`.

    The result is the name of the base rate, its value, and the largest product with the schedule at
    many sampled steps. It is None if the schedule gives no value.
    """
    rates, name = _rates_of(task)
    last = max(steps - 1, 0)

    def value(step: int) -> float:
        return float(own.Value(tf.constant(step, tf.int64)))

    try:
        own = rates.lr_schedule.Instantiate()
        if own.vars.Flatten():
            return None
        evenly = np.linspace(0, last, _PLACES)
        looked_at = np.unique(np.rint([*evenly, *np.geomspace(1, last + 1, _PLACES) - 1]))
        values = [value(int(step)) for step in looked_at]
        at = int(np.argmax(values))
        around = looked_at[max(at - 1, 0)], looked_at[min(at + 1, len(looked_at) - 1)]
        closer = np.unique(np.rint(np.linspace(*around, _PLACES)))
        peak = max(value(int(step)) for step in closer)
    # A user's schedule may raise anything outside of a run.
    except Exception:
        return None
    return name, rates.learning_rate, rates.learning_rate * peak


def name_of_rate(task: Any) -> str:
    """Returns the name of the param that sets a task's learning rate."""
    return _rates_of(task)[1]


def _rates_of(task: Any) -> tuple[Any, str]:
    """Returns the params with the learning rate, of the learner or the task, and its name."""
    train = task.train
    learner = None if train is None else train.learner
    if isinstance(learner, list | tuple):
        # Without exactly one learner, other code raises an error.
        return (learner[0] if learner else None), "p.train.learner[0].learning_rate"
    if learner is not None:
        return learner, "p.train.learner.learning_rate"
    return train, "p.train.learning_rate"
