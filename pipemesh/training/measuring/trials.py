"""Steps under a few plans, run in turn."""

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
    """Runs some steps in turn: other work on the machine makes all of a round longer.

    Args:
        steps: some.
        number: of rounds.

    Returns:
        Of each round the seconds of each step, and those that all cores took for it.
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
    """Seconds of a training step under each of some plans, to choose among them.

    Args:
        make: the model under a plan.
        batch: one of its batches.
        plans: some; all of them are held at once.
        say: is told what is being measured, and why a plan cannot be.

    Returns:
        One for each plan; endless for one that cannot be had for the model.

    Raises:
        PipemeshError: none of them can.
    """
    # What was measured before may hold much memory.
    gc.collect()
    steps: dict[int, TimedStep] = {}
    failed: PipemeshError | None = None
    for i, plan in enumerate(plans):
        say(f"a trial of '{plan}'")
        try:
            steps[i] = TimedStep(make(plan), batch)
        except PipemeshError as error:
            # Without its traceback, which holds what was built.
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
