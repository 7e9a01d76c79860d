"""A learning rate that grows from step to step, and the largest one of a schedule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import schedule

# A schedule is looked at in so many places.
_PLACES = 200


class Ramp(schedule.BaseSchedule):
    """Learning rates that grow by the same factor from step to step.

    Example:
        >>> from lingvo.core import py_utils
        >>> py_utils.SetEagerMode(True, test_mode=True)
        >>> ramp = Ramp.Params().Set(first_step=10, steps=3, low=0.01, high=1.0).Instantiate()
        >>> [round(float(ramp.Value(tf.constant(step))), 4) for step in (10, 11, 12)]
        [0.01, 0.1, 1.0]
        >>> py_utils.SetEagerMode(False, test_mode=True)
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `first_step`, `steps`, `low` and `high`."""
        p = super().Params()
        p.Define("first_step", 0, "The step with the lowest one.")
        p.Define("steps", 100, "How many there are; at least 2.")
        p.Define("low", 1e-7, "The lowest one.")
        p.Define("high", 10.0, "The highest one.")
        return p

    def Value(self, step: Any = None) -> tf.Tensor:
        """The learning rate of a step, a scalar; of steps beyond the last one the highest.

        Args:
            step: a scalar tensor; by default the global step.
        """
        p = self.params
        share = tf.cast(self.GetStep(step) - p.first_step, p.dtype) / (p.steps - 1)
        share = tf.clip_by_value(share, 0.0, 1.0)
        return p.low * tf.exp(share * math.log(p.high / p.low))


def ramped(task: Any, first_step: int, steps: int) -> Any:
    """A copy of a task's params that trains with a `Ramp` in place of its learning rates.

    Args:
        task: params of a lingvo task.
        first_step: of the ramp.
        steps: that it takes.
    """
    copy = task.Copy()
    _rates_of(copy).Set(
        learning_rate=1.0,
        lr_schedule=Ramp.Params().Set(name="ramp", first_step=first_step, steps=steps),
    )
    return copy


def peak_rate(task: Any, steps: int) -> tuple[float, float] | None:
    """The largest learning rate of a task's own schedule.

    Args:
        task: params of a lingvo task.
        steps: that it will be trained for.

    Returns:
        Its factor `learning_rate`, and the largest product of that and the schedule among steps
        that lie evenly from 0 to `steps`; None for a schedule that has state.
    """
    rates = _rates_of(task)
    own = rates.lr_schedule.Instantiate()
    if own.vars.Flatten():
        return None
    looked_at = np.unique(np.linspace(0, steps, _PLACES + 1).astype(np.int64))
    values = [float(own.Value(tf.constant(step))) for step in looked_at]
    return rates.learning_rate, rates.learning_rate * max(values)


def _rates_of(task: Any) -> Any:
    """The params that have the learning rate: of the learner, or of a task that makes its own."""
    found = task.train.learner
    if isinstance(found, list | tuple):
        found = found[0]
    return task.train if found is None else found
