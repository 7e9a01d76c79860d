"""Steps under a few plans, run in turn."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from pipemesh.plan import Plan
from pipemesh.training.measuring.action_times import ROUNDS, in_turn
from pipemesh.training.measuring.layers import Make
from pipemesh.training.measuring.timed_step import TimedStep


def in_rounds(
    make: Make,
    batch: Any,
    plans: Sequence[Plan],
    number: int,
    say: Callable[[Plan], None],
) -> tuple[list[list[float]], list[list[float]]]:
    """Runs steps under some plans in turn: other work on the machine makes all of a round longer.

    Args:
        make: the model under a plan.
        batch: one of its batches.
        plans: some; all of them are held at once.
        number: of rounds.
        say: is told which plan's step is being built.

    Returns:
        Of each round the seconds of each step, and those that all cores took for it.

    Raises:
        PlanError: a plan cannot be had for the model.
        PipemeshError: likewise.
    """
    steps: list[TimedStep] = []
    for plan in plans:
        say(plan)
        steps.append(TimedStep(make(plan), batch))
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
        say: is told what is being measured.

    Raises:
        PlanError: a plan cannot be had for the model.
        PipemeshError: likewise.
    """
    # What was measured before may hold much memory.
    gc.collect()
    seconds, _ = in_rounds(make, batch, plans, ROUNDS, lambda plan: say(f"a trial of '{plan}'"))
    return in_turn(seconds)
