"""Which backward passes compute their forward pass again, by the name of a policy."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.schedule import Schedule

FULL, NONE, EXCEPT_LAST, TWICE = NAMES = ("full", "none", "except_last", "twice")
CUSTOM = "custom"
"""A policy that only Python knows; forecasts take it for `full`."""


def modes_of(remat: str, schedule: Schedule) -> dict[tuple[int, int], str]:
    """Returns for each (stage, microbatch) what its backward pass computes again.

    `full` is all, once; `twice` is all, and once more in a `W`; `none` is nothing. `except_last` is
    `none` where the backward pass follows the forward pass at once, else `full`. (In torchgpipe,
    from which it has its name, that is the last microbatch.)

    Args:
        remat: the name of a policy, or one name a stage with commas between.
        schedule: a valid schedule.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> modes_of("except_last,twice", gpipe(2, 2))
        {(0, 0): 'full', (0, 1): 'none', (1, 0): 'twice', (1, 1): 'twice'}
    """
    names = remat.split(",")
    by_stage: Sequence[str] = names * schedule.num_stages if len(names) == 1 else names
    at_once = schedule.turns_at_once() if EXCEPT_LAST in names else frozenset[tuple[int, int]]()

    def mode(stage: int, microbatch: int) -> str:
        if by_stage[stage] == EXCEPT_LAST:
            return NONE if (stage, microbatch) in at_once else FULL
        return FULL if by_stage[stage] == CUSTOM else by_stage[stage]

    return {
        (stage, microbatch): mode(stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
