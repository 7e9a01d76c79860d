"""When a stage works on which microbatch, if activations circle through the cores."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TickPlan:
    """The clock of a pipeline whose activations move one core on at each tick.

    Core s works on the microbatch that core s - 1 worked on one tick before; what leaves the last
    core enters the first one again until it has circled `num_circles` times. A circle begins
    every `period` ticks: a microbatch is at the first core again after `num_stages` ticks at the
    earliest, and the first core takes in `num_microbatches` others before it is its turn.

    Attributes:
        num_stages: S, the number of cores in a row.
        num_microbatches: M.
        num_circles: R, how many stages each core holds.

    Example:
        >>> plan = TickPlan(num_stages=2, num_microbatches=3, num_circles=1)
        >>> plan.num_ticks
        4
        >>> for stage in range(2):
        ...     print([m if busy else "-" for _, m, busy in map(plan.at, [stage] * 4, range(4))])
        [0, 1, 2, '-']
        ['-', 0, 1, 2]
    """

    num_stages: int
    num_microbatches: int
    num_circles: int = 1

    @property
    def period(self) -> int:
        """Ticks from the begin of one circle to that of the next."""
        return max(self.num_microbatches, self.num_stages)

    @property
    def num_ticks(self) -> int:
        """M * R + S - 1 if there are at least as many microbatches as stages."""
        return (self.num_circles - 1) * self.period + self.num_microbatches + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """The part of all ticks in which a core has nothing to do."""
        return 1 - self.num_circles * self.num_microbatches / self.num_ticks

    def at(self, stage: Any, tick: Any) -> tuple[Any, Any, Any]:
        """What a stage does at a tick.

        Args:
            stage: its number, an int or int32 tensor.
            tick: the same.

        Returns:
            The circle, the microbatch, and whether there is such work; if not, the first two
            may lie outside of their ranges.
        """
        since = tick - stage
        circle, microbatch = since // self.period, since % self.period
        busy = (circle >= 0) & (circle < self.num_circles) & (microbatch < self.num_microbatches)
        return circle, microbatch, busy
