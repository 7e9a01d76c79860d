"""The least bottleneck where a longer stage is not always the worse one.

Transfer times, inputs kept for recomputation and a least number of layers make some long stages
cheaper or better than parts of them, so that all reachable boundaries have to be tracked, not only
the farthest. For a given bottleneck a stage from i to j is good if j lies in an interval that
depends on i, and `out(j) <= slack(i)`: the transfer at j has to fit into what the compute time and
the transfer at i leave. Whether any reachable i serves j is then a maximum over the intervals that
cover j, and whether any good j serves i is a minimum over an interval: both are tables of
intervals of length 1, 2, 4, ..., so that one stage with n boundaries takes n log n steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipemesh.partition.integers import Ints, search
from pipemesh.partition.search.dense import Candidates, as_array, least_bottleneck, pairs
from pipemesh.partition.search.problem import Problem

DENSE_PAIRS = 2_000_000
"""Up to so many pairs of boundaries, one dense program replaces the rest of the search."""

_NOTHING = -(2**62)


class _Interval:
    """For one stage: where it may end, for each place where it begins."""

    def __init__(
        self, problem: Problem, stage: int, begin: Ints, end: Ints, bottleneck: int
    ) -> None:
        prefix = problem.prefix(stage)
        first = problem.first_end(begin)
        last = problem.last_end(stage, begin)
        most = prefix[begin] + bottleneck
        transfers = problem.times.transfers
        self.slack: Ints | None = None
        self.out: Ints | None = None
        if transfers is not None and problem.overlapped:
            self.slack, self.out = bottleneck - transfers[begin], transfers[end]
        elif transfers is not None:
            most = most - transfers[begin]
            self.slack, self.out = most, prefix[end] + transfers[end]
        # As indices into the candidates.
        self.low = search(end, first, side="left")
        self.high = np.minimum(
            search(end, last, side="right"),
            search(prefix[end], most, side="right"),
        )
        self.some = self.low < self.high
        self.size = int(end.size)

    def _levels(self) -> tuple[Ints, Ints, Ints, int]:
        low, high = self.low[self.some], self.high[self.some]
        # frexp gives the exponent of the next power of two above the length.
        level = np.frexp((high - low).astype(np.float64))[1] - 1
        return low, high, level, int(level.max(initial=0))

    def reached(self) -> Ints:
        """Which ends some begin serves, as booleans."""
        low, high, level, top = self._levels()
        if self.slack is None or self.out is None:
            change = np.zeros(self.size + 1, dtype=np.int64)
            np.add.at(change, low, 1)
            np.add.at(change, high, -1)
            return np.cumsum(change[:-1]) > 0
        slack = self.slack[self.some]
        table = np.full((top + 1, self.size), _NOTHING, dtype=np.int64)
        np.maximum.at(table, (level, low), slack)
        np.maximum.at(table, (level, high - (1 << level)), slack)
        for row in range(top, 0, -1):
            half = 1 << (row - 1)
            np.maximum(table[row - 1], table[row], out=table[row - 1])
            shifted = table[row - 1, half:]
            np.maximum(shifted, table[row, : self.size - half], out=shifted)
        return table[0] >= self.out

    def served(self) -> Ints:
        """Which begins have some end, as booleans."""
        if self.slack is None or self.out is None:
            return self.some
        low, high, level, top = self._levels()
        table = [self.out]
        for row in range(1, top + 1):
            half = 1 << (row - 1)
            table.append(np.minimum(table[-1][:-half], table[-1][half:]))
        least = np.empty(low.size, dtype=np.int64)
        for row in range(top + 1):
            here = np.flatnonzero(level == row)
            if here.size:
                least[here] = np.minimum(table[row][low[here]], table[row][high[here] - (1 << row)])
        served: Ints = np.zeros(self.some.shape, dtype=bool)
        served[self.some] = least <= self.slack[self.some]
        return served


def alive(problem: Problem, candidates: Candidates, bottleneck: int) -> Candidates | None:
    """Keeps the candidates through which an allowed cut runs.

    Args:
        problem: the problem, one stage a device, with times in `int64`.
        candidates: places of each boundary.
        bottleneck: no stage may take longer.

    Returns:
        Fewer candidates, or `None` if there is no allowed cut.
    """
    kept = [as_array(candidates[0])]
    for stage in range(problem.num_stages):
        ends = as_array(candidates[stage + 1])
        # No stage ends beyond what compute time alone allows.
        prefix = problem.prefix(stage)
        farthest = prefix[kept[-1][-1]] + bottleneck
        ends = ends[: int(search(prefix[ends], farthest, side="right"))]
        ends = ends[int(search(ends, kept[-1][0], side="right")) :]
        if not ends.size:
            return None
        ends = ends[_Interval(problem, stage, kept[-1], ends, bottleneck).reached()]
        if not ends.size:
            return None
        kept.append(ends)
    for stage in reversed(range(problem.num_stages)):
        begins = kept[stage]
        prefix = problem.prefix(stage)
        nearest = prefix[kept[stage + 1][0]] - bottleneck
        begins = begins[int(search(prefix[begins], nearest, side="left")) :]
        interval = _Interval(problem, stage, begins, kept[stage + 1], bottleneck)
        kept[stage] = begins[interval.served()]
    return list(kept)


def _some_cut(problem: Problem, candidates: Candidates, bottleneck: int) -> int:
    """The bottleneck that one cut through alive candidates attains."""
    begin, worst = 0, 0
    for stage in range(problem.num_stages):
        ends = as_array(candidates[stage + 1])
        here = np.asarray([begin])
        times = problem.stage_times(stage, here, ends)
        good = problem.allowed(stage, here, ends)[0] & (times <= bottleneck)
        # The last good end leaves least for the stages that follow.
        index = int(np.flatnonzero(good)[-1])
        worst = max(worst, int(times[index]))
        begin = int(ends[index])
    return worst


def cover_bottleneck(problem: Problem) -> tuple[int, Candidates] | None:
    """Finds the least bottleneck of any problem.

    Args:
        problem: the problem, one stage a device, with times in `int64`.

    Returns:
        The bottleneck and, for each boundary, all places where an allowed cut may have it; `None`
        if there is no allowed cut.
    """
    first, last = problem.windows()
    candidates: Candidates = [
        range(int(begin), int(end) + 1) for begin, end in zip(first, last, strict=True)
    ]
    if any(not len(places) for places in candidates):
        return None
    low, step, high = _least_possible(problem), 1, problem.forever
    kept: Candidates | None = None
    step = max(low // 8, 1)
    while kept is None:
        trial = min(low + step, problem.forever)
        kept = alive(problem, candidates, trial)
        if kept is not None:
            high = _some_cut(problem, kept, trial)
        elif trial >= problem.forever:
            return None
        else:
            low, step = trial + 1, step * 4
    while low < high:
        if pairs(kept) <= DENSE_PAIRS:
            found = least_bottleneck(problem, kept, high)
            high = high if found is None else found
            break
        trial = (low + high) // 2
        fewer = alive(problem, kept, trial)
        if fewer is None:
            low = trial + 1
        else:
            kept, high = fewer, _some_cut(problem, fewer, trial)
    tied = problem.tied(high)
    kept = alive(problem, candidates if tied > high else kept, tied)
    assert kept is not None
    return tied, kept


def _least_possible(problem: Problem) -> int:
    """A bottleneck below which there is certainly no cut."""
    least: Any = None
    if len(set(problem.kind_of_stage)) == 1:
        prefix = problem.prefix(0)
        least = max(-(-int(prefix[-1]) // problem.num_stages), int(np.diff(prefix).max()))
    return least or 0
