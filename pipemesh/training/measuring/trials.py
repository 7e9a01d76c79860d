"""What steps take under a few plans, to choose among those whose forecasts are alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from pipemesh.plan import Plan
from pipemesh.training.measuring.action_times import ROUNDS, in_turn
from pipemesh.training.measuring.layers import Make
from pipemesh.training.measuring.timed_step import TimedStep


def seconds_of(
    make: Make, batch: Any, plans: Sequence[Plan], say: Callable[[str], None] = lambda text: None
) -> list[float]:
    """Seconds of a training step under each of some plans.

    All are built and then run in turn, so that other work on the machine makes all longer alike.

    Args:
        make: the model under a plan.
        batch: one of its batches.
        plans: some; all of them are held at once.
        say: is told what is being measured.

    Raises:
        PlanError: a plan cannot be had for the model.
        PipemeshError: likewise.
    """
    gc.collect()
    steps: list[TimedStep] = []
    for plan in plans:
        say(f"a trial of '{plan}'")
        steps.append(TimedStep(make(plan), batch))
    return in_turn([[step.run() for step in steps] for _ in range(ROUNDS)])
