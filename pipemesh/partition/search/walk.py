"""In which order the stages of devices are cut: nothing but where stages lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Turn:
    """One stage of a device, when it is its turn.

    Attributes:
        stage: which one.
        knows_begin: whether it is known where the stage begins.
        knows_end: whether it is known where it ends.
        beyond: the next boundary that is known, on the side of the one that is not.
        between: the devices of the stages that lie between, each once.
    """

    stage: int
    knows_begin: bool
    knows_end: bool
    beyond: int
    between: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Walk:
    """The turns of all stages, device by device.

    Step d cuts the stages of device d. At least one end of each is known by then: boundaries for
    which that would not hold are placed before the first step.

    Attributes:
        starts: boundaries that are placed before the first step, rising.
        turns: for each device its stages.
        open: before each step, and after the last one, the boundaries between a stage that is done
            and one that is not, and what is left of `starts`, rising.
        closed: the same for boundaries that the step before placed between two stages of its own.
        gaps: before each step, and after the last one, the first and the last boundary of each run
            of stages that are not done.
    """

    starts: tuple[int, ...]
    turns: tuple[tuple[Turn, ...], ...]
    open: tuple[tuple[int, ...], ...]
    closed: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    @functools.cache
    def over(cls, stage_devices: tuple[int, ...]) -> Walk:
        """The walk over stages that lie on these devices.

        Args:
            stage_devices: for each stage its device.

        Example:
            >>> Walk.over((0, 1, 2, 0, 1, 2)).starts, Walk.over((0, 1, 2, 2, 1, 0)).starts
            ((3,), ())
        """
        starts: set[int] = set()
        while True:
            walk = _walk(stage_devices, sorted(starts))
            if isinstance(walk, Walk):
                return walk
            starts.add(walk)


def _walk(stage_devices: tuple[int, ...], starts: Sequence[int]) -> Walk | int:
    """The walk, or a boundary that would have to be placed before it."""
    stages = len(stage_devices)
    known, done = {0, stages, *starts}, set[int]()
    turns: list[tuple[Turn, ...]] = []
    opens, closed = [tuple(starts)], [()]
    gaps = [tuple(_gaps(stages, done))]
    for device in range(max(stage_devices) + 1):
        mine: list[Turn] = []
        placed: set[int] = set()
        for stage in (stage for stage, owner in enumerate(stage_devices) if owner == device):
            begin, end = stage in known, stage + 1 in known
            if not begin and not end:
                return stage
            if end:
                beyond = max((b for b in known if b < stage), default=0)
                between = stage_devices[beyond:stage]
            else:
                beyond = min(b for b in known if b > stage)
                between = stage_devices[stage + 1 : beyond]
            mine.append(Turn(stage, begin, end, beyond, tuple(sorted(set(between)))))
            placed |= {stage, stage + 1} - known
            known |= placed
            done.add(stage)
        turns.append(tuple(mine))
        still = {b for b in known if 0 < b < stages and not {b - 1, b} <= done}
        opens.append(tuple(sorted(still)))
        closed.append(tuple(sorted(placed - still)))
        gaps.append(tuple(_gaps(stages, done)))
    return Walk(tuple(starts), tuple(turns), tuple(opens), tuple(closed), tuple(gaps))


def _gaps(stages: int, done: set[int]) -> Iterator[tuple[int, int]]:
    begin = None
    for stage in range(stages + 1):
        if stage < stages and stage not in done:
            begin = stage if begin is None else begin
        elif begin is not None:
            yield begin, stage
            begin = None
