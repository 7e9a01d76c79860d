"""Temporary memory of actions and of the update, beside stored buffers."""

from __future__ import annotations

import dataclasses

from pipemesh.backend.peak import TensorMemory
from pipemesh.schedule import Action
from pipemesh.training.measuring.timed_step import TimedStep

# The order of independent operations changes from step to step.
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class WorkingMemory:
    """Temporary memory of a step on one device.

    Attributes:
        stages: for each stage the peak bytes of one of its actions, less the bytes held at its
            start or end, whichever is more.
        update: peak bytes after the last action, beside weights and optimizer state.
    """

    stages: tuple[int, ...]
    update: int


def working_memory(step: TimedStep) -> WorkingMemory | None:
    """Returns the temporary memory of a step with a clock, or None if TensorFlow does not count it.

    The step needs one device and at least two microbatches. The first microbatch is left out, as it
    allocates the gradient sums.
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
        # An action without operations may have no start.
        elif action.microbatch and action in held:
            needed = peak - max(held[action], now)
            most[action.stage] = max(most[action.stage], needed)

    step.noted = note
    try:
        for _ in range(_ROUNDS):
            before = memory.current
            memory.forget_peak()
            step.run()
            # The peak since the last action ended.
            update = max(update, memory.peak - before)
    finally:
        step.noted = None
    return WorkingMemory(tuple(most), update)
