"""Steps under several plans, run in turn."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan import Plan
from pipemesh.training.measuring.action_times import ROUNDS, in_turn
from pipemesh.training.measuring.layers import Make
from pipemesh.training.measuring.timed_step import TimedStep


def in_rounds(
    steps: Sequence[TimedStep], number: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Runs steps in turn, so that other load slows a whole round.

    Returns for each round the seconds of each step, and the core seconds of each step.
    """
    seconds: list[list[float]] = []
    work: list[list[float]] = []
    for _ in range(number):
        seconds.append([step.run() for step in steps])
        work.append([step.cpu for step in steps])
    return seconds, work


def seconds_of(
    make: Make, batch: Any, plans: Sequence[Plan], say: Callable[[str], None] = lambda text: None
) -> list[float]:
    """Returns the seconds of a training step under each plan, infinite for an impossible plan.

    All plans are in memory at once. Raises PipemeshError if no plan is possible.
    """
    # Earlier measurements may hold much memory.
    gc.collect()
    steps: dict[int, TimedStep] = {}
    failed: PipemeshError | None = None
    for i, plan in enumerate(plans):
        say(f"a trial of '{plan}'")
        try:
            steps[i] = TimedStep(make(plan), batch)
        except PipemeshError as error:
            # The traceback would keep the built model alive.
            failed = error.with_traceback(None)
        except tf.errors.ResourceExhaustedError:
            failed = PlanError(f"'{plan}' needs more memory than there is")
        else:
            continue
        say(f"nothing of it, since it cannot be had: {failed}")
    if failed is not None and not steps:
        raise failed
    found = in_turn(in_rounds(list(steps.values()), ROUNDS)[0])
    took = dict(zip(steps, found, strict=True))
    return [took.get(i, math.inf) for i in range(len(plans))]
