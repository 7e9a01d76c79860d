"""What actions and the update need while they run, beside what is kept."""

from __future__ import annotations

import dataclasses

from pipemesh.backend.peak import TensorMemory
from pipemesh.schedule import Action
from pipemesh.training.measuring.timed_step import TimedStep

# Operations that need nothing of each other run in another order in each step.
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class WorkingMemory:
    """What a step on one device needs for a while.

    Attributes:
        stages: for each stage the bytes that one of its actions needs while it runs, beside what
            is held when it starts, or when it ends if that is more.
        update: the most bytes after the last action, beside weights and the optimizer's state:
            gradients, and what is made of them.
    """

    stages: tuple[int, ...]
    update: int


def working_memory(step: TimedStep) -> WorkingMemory | None:
    """What a clocked step needs while it runs; its first microbatch is left aside.

    Sums of gradients are made by that one, and the others find them.

    Args:
        step: on one device, with two microbatches or more.

    Returns:
        What it needs, or None where TensorFlow does not count the device's memory.
    """
    memory = TensorMemory(step.trained.all_devices()[0])
    if not memory.is_counted:
        return None
    held: dict[Action, int] = {}
    most = [0] * step.plan.num_stages
    update = 0

    def note(action: Action, is_end: bool) -> None:
        now, peak = memory.current, memory.peak
        memory.forget_peak()
        if not is_end:
            held[action] = now
        # An action in which nothing is computed has an end at most.
        elif action.microbatch and action in held:
            needed = peak - max(held[action], now)
            most[action.stage] = max(most[action.stage], needed)

    step.noted = note
    try:
        for _ in range(_ROUNDS):
            before = memory.current
            memory.forget_peak()
            step.run()
            # Since the last action ended.
            update = max(update, memory.peak - before)
    finally:
        step.noted = None
    return WorkingMemory(tuple(most), update)
