"""A learning rate that grows from step to step, and the largest one of a schedule."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

import math
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import schedule

# The lowest and the highest rate of a ramp.
LOW, HIGH = 1e-7, 10.0
# A schedule is looked at in so many places, evenly by steps and by their logarithms, and in as many
# again around the largest value.
_PLACES = 200


class Ramp(schedule.BaseSchedule):
    """Learning rates that grow by the same factor from step to step.

    Attributes:
        first_step: the step with the lowest one.

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
        """The learning rate of a step, a scalar; of steps beyond the last one the highest.

        Args:
            step: a scalar tensor; by default the global step.
        """
        p = self.params
        now: Any = self.GetStep(step)
        share = tf.cast(now - self.first_step, p.dtype) / (p.steps - 1)
        share = tf.clip_by_value(share, 0.0, 1.0)
        return p.low * tf.exp(share * math.log(p.high / p.low))


def ramped(task: Any, steps: int) -> Any:
    """A copy of a task's params that trains with a `Ramp` in place of its learning rates.

    Args:
        task: params of a lingvo task; one without a learner is returned as it is.
        steps: that the ramp takes.
    """
    copy = task.Copy()
    rates, _ = _rates_of(copy)
    if rates is not None:
        ramp = Ramp.Params().Set(name="ramp", steps=steps)
        rates.Set(learning_rate=1.0, lr_schedule=ramp)
    return copy


def has_state(task: Any) -> bool:
    """Whether the schedule of a task's learning rates has variables."""
    rates, _ = _rates_of(task)
    return rates is not None and bool(rates.lr_schedule.Instantiate().vars.Flatten())


def peak_rate(task: Any, steps: int) -> tuple[str, float, float] | None:
    """The largest learning rate of a task's own schedule.

    Args:
        task: params of a lingvo task.
        steps: that it will be trained for.

    Returns:
        What its factor is called, the factor, and the largest product of that and the schedule
        among steps from 0 to `steps`, many but not all of them; None if the schedule does not say.
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
    # Whatever somebody's schedule raises where there is no training around it.
    except Exception:
        return None
    return name, rates.learning_rate, rates.learning_rate * peak


def name_of_rate(task: Any) -> str:
    """The name of the param that says how large a task's learning rates are."""
    return _rates_of(task)[1]


def _rates_of(task: Any) -> tuple[Any, str]:
    """The params that have the learning rate, of the learner or the task, and what it is called."""
    train = task.train
    learner = None if train is None else train.learner
    if isinstance(learner, list | tuple):
        # None, or several, are refused elsewhere.
        return (learner[0] if learner else None), "p.train.learner[0].learning_rate"
    if learner is not None:
        return learner, "p.train.learner.learning_rate"
    return train, "p.train.learning_rate"
