"""The least bottleneck of a problem with one stage a device, by three searches.

* Small problems: a dynamic program over every pair of boundaries.
* Monotone problems, in which every part of an allowed stage is allowed and takes no longer: for a
  given bottleneck, the cut that makes each stage as long as possible reaches at least as far as any
  other after every stage.
* All others: transfer times, inputs kept for recomputation and a least number of layers make some
  long stages better than parts of them, so every boundary that can be reached is tracked.

README.md has the proofs.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from pipemesh.partition.costs import Ints, search
from pipemesh.partition.problem import FEW_PAIRS, Candidates, Problem, as_array, num_pairs

_NOTHING = -(2**62)


def least_bottleneck(problem: Problem) -> tuple[int, Candidates] | None:
    """Finds the least bottleneck, and all places that an allowed cut under it may use."""
    # The bottleneck includes what rounding may add.
    candidates = _all_places(problem)
    if candidates is None:
        return None
    if _is_small(problem, candidates):
        bottleneck = dense_bottleneck(problem, candidates, problem.forever)
        return None if bottleneck is None else (problem.tied(bottleneck), candidates)
    if problem.monotone and singles_fit(problem) is not None:
        result = greedy_bottleneck(problem)
        if result is not UNDECIDED:
            return result
    return reachable_bottleneck(problem, candidates)


def has_cut(problem: Problem, bottleneck: int) -> bool:
    """Returns True if some allowed cut has no stage that takes longer than the bottleneck."""
    candidates = _all_places(problem)
    if candidates is None:
        return False
    if _is_small(problem, candidates):
        return dense_bottleneck(problem, candidates, bottleneck + 1) is not None
    if problem.monotone:
        single = singles_fit(problem)
        if single is not None and single <= bottleneck:
            return Greedy(problem).forward(bottleneck)[0] is not None
    return alive(problem, candidates, bottleneck) is not None


def _all_places(problem: Problem) -> Candidates | None:
    """Returns all places of each boundary; `None` if a boundary has none."""
    first, last = problem.windows()
    if (first > last).any():
        return None
    return [range(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]


def _is_small(problem: Problem, candidates: Candidates) -> bool:
    return problem.times.dtype is object or num_pairs(candidates) <= FEW_PAIRS


def dense_bottleneck(problem: Problem, candidates: Candidates, below: int) -> int | None:
    """Finds the least bottleneck below a bound by looking at every pair of candidates."""
    dtype = problem.times.dtype
    best: Ints = np.zeros(1, dtype=dtype)
    # As an array, because it may not fit an `int64`.
    bound: Ints = np.asarray(below, dtype=dtype)
    for stage in range(problem.num_stages):
        begin, end = as_array(candidates[stage]), as_array(candidates[stage + 1])
        if not begin.size or not end.size:
            return None
        times = problem.stage_times(stage, begin[:, None], end[None, :])
        worst = np.maximum(best[:, None], times)
        worst = np.where(problem.allowed(stage, begin, end), worst, bound)
        best = np.minimum(worst.min(axis=0), bound)
    least = int(best[0])
    return least if least < below else None


class Greedy:
    """Longest stages under a bottleneck, from the front and from the back."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._first, self._last = (window.tolist() for window in problem.windows())
        self._walls: Ints = np.asarray([0, *problem.barriers, problem.size])

    def forward(self, bottleneck: int) -> tuple[list[int] | None, int]:
        """Returns the farthest place of each boundary, and the next bottleneck with other ones."""
        # Each stage is as long as possible, from the first to the last. The places are `None` if
        # the last layer is out of reach.
        problem, reached = self._problem, [0]
        following = problem.forever
        begin = 0
        for stage in range(problem.num_stages):
            times = problem.prefix(stage)
            most = self._last[stage + 1]
            if problem.max_layers is not None:
                longest = problem.positions[begin] + problem.max_layers
                most = min(most, int(search(problem.positions, longest, "right")) - 1)
            if problem.barriers:
                most = min(most, int(self._walls[search(self._walls, begin, "right")]))
            most = self._longest_in_memory(stage, begin, most)
            end = min(most, int(search(times, times[begin] + bottleneck, "right")) - 1)
            if end < most:
                following = min(following, int(times[end + 1] - times[begin]))
            if end <= begin or end < self._first[stage + 1]:
                return None, following
            reached.append(end)
            begin = end
        return reached, following

    def backward(self, bottleneck: int) -> list[int]:
        """Makes each stage as long as possible, from the last to the first, if there is a cut."""
        problem = self._problem
        end = problem.size
        reached = [end]
        for stage in reversed(range(problem.num_stages)):
            times = problem.prefix(stage)
            least = self._first[stage]
            if problem.max_layers is not None:
                longest = problem.positions[end] - problem.max_layers
                least = max(least, int(search(problem.positions, longest, "left")))
            if problem.barriers:
                least = max(least, int(self._walls[search(self._walls, end, "left") - 1]))
            least = max(least, min(int(search(times, times[end] - bottleneck, "left")), end))
            end = self._longest_before(stage, least, end)
            reached.append(end)
        reached.reverse()
        return reached

    def _fits(self, stage: int, begin: int, end: int) -> bool:
        memory = self._problem.memory
        return memory is None or int(memory.units(stage, begin, end)) <= (memory.limit or 0)

    def _longest_in_memory(self, stage: int, begin: int, most: int) -> int:
        if most <= begin or self._fits(stage, begin, most):
            return most

        def too_large(end: int) -> bool:
            return not self._fits(stage, begin, end)

        return begin + bisect_left(range(begin, most + 1), True, key=too_large) - 1

    def _longest_before(self, stage: int, least: int, end: int) -> int:
        if self._fits(stage, least, end):
            return least

        def fits(begin: int) -> bool:
            return self._fits(stage, begin, end)

        return least + bisect_left(range(least, end), True, key=fits)


UNDECIDED: tuple[int, Candidates] = (-1, [])
"""The result of `greedy_bottleneck` where longest stages prove nothing."""


def singles_fit(problem: Problem) -> int | None:
    """Returns the least bottleneck under which every single layer is allowed on every device."""
    # Longest stages are optimal only from this bottleneck on. Below, a long stage can leave the
    # next device with a layer that it cannot take, while a shorter one would have left it a smaller
    # layer.
    memory = problem.memory
    if memory is not None:
        assert memory.limit is not None
        parameters, activations = np.diff(memory.parameters), np.diff(memory.activations)
        most = max(memory.activation_weight)
        if int((parameters + most * activations).max()) > memory.limit:
            return None
    return max(
        int(np.diff(problem.times.prefix(kind)).max()) for kind in set(problem.kind_of_stage)
    )


def greedy_bottleneck(problem: Problem) -> tuple[int, Candidates] | None:
    """Finds the least bottleneck of a monotone problem in which every single layer fits."""
    # An interval of bottlenecks is halved. One that works is replaced by the bottleneck of its cut,
    # one that does not by the least bottleneck that changes its cut. The result is `UNDECIDED` if
    # the least bottleneck may lie below `singles_fit`.
    greedy = Greedy(problem)

    def attained(cut: list[int]) -> int:
        prefixes = map(problem.prefix, range(problem.num_stages))
        return max(
            int(times[end] - times[begin])
            for times, begin, end in zip(prefixes, cut, cut[1:], strict=False)
        )

    alike = len(set(problem.kind_of_stage)) == 1
    prefix: Any = problem.prefix(0)
    low = singles_fit(problem)
    assert low is not None
    if alike:
        low = max(low, -(-int(prefix[-1]) // problem.num_stages))
    # The least bottleneck is often this bound itself, where one layer outweighs all the rest.
    step, high = 0, None
    while high is None:
        cut, following = greedy.forward(min(low + step, problem.forever))
        if cut is not None:
            high = attained(cut)
            if not alike and step == 0:
                # Below, some layers fit some devices only.
                return UNDECIDED
        elif following >= problem.forever:
            return None
        else:
            low, step = max(following, low), max(2 * step, int(np.diff(prefix).max()), 1)
    while low < high:
        cut, following = greedy.forward((low + high) // 2)
        if cut is None:
            low = following
        else:
            high = attained(cut)
    high = problem.tied(high)
    ends = greedy.forward(high)[0]
    assert ends is not None
    return high, [
        range(begin, end + 1) for begin, end in zip(greedy.backward(high), ends, strict=True)
    ]


class StageIntervals:
    """For one stage under a bottleneck, the interval of its ends for each of its begins.

    An end j in the interval of a begin i is good if `out(j) <= slack(i)`: the transfer at j must
    fit into the time that compute and the transfer at i leave. A good begin for an end is a maximum
    over the intervals that cover it, and a good end for a begin is a minimum over its interval.
    Tables of intervals of length 1, 2, 4, ... give both in n log n steps.
    """

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
        self.nonempty = self.low < self.high
        self.size = int(end.size)

    def _levels(self) -> tuple[Ints, Ints, Ints, int]:
        low, high = self.low[self.nonempty], self.high[self.nonempty]
        # frexp gives the exponent of the next power of two above the length.
        level = np.frexp((high - low).astype(np.float64))[1] - 1
        return low, high, level, int(level.max(initial=0))

    def reached(self) -> Ints:
        """Returns for each end whether some begin serves it."""
        low, high, level, top = self._levels()
        if self.slack is None or self.out is None:
            change = np.zeros(self.size + 1, dtype=np.int64)
            np.add.at(change, low, 1)
            np.add.at(change, high, -1)
            return np.cumsum(change[:-1]) > 0
        slack = self.slack[self.nonempty]
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
        """Returns for each begin whether it has some end."""
        if self.slack is None or self.out is None:
            return self.nonempty
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
        served: Ints = np.zeros(self.nonempty.shape, dtype=bool)
        served[self.nonempty] = least <= self.slack[self.nonempty]
        return served


def alive(problem: Problem, candidates: Candidates, bottleneck: int) -> Candidates | None:
    """Keeps the candidates through which an allowed cut runs; `None` if there is no such cut."""
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
        ends = ends[StageIntervals(problem, stage, kept[-1], ends, bottleneck).reached()]
        if not ends.size:
            return None
        kept.append(ends)
    for stage in reversed(range(problem.num_stages)):
        begins = kept[stage]
        prefix = problem.prefix(stage)
        nearest = prefix[kept[stage + 1][0]] - bottleneck
        begins = begins[int(search(prefix[begins], nearest, side="left")) :]
        intervals = StageIntervals(problem, stage, begins, kept[stage + 1], bottleneck)
        kept[stage] = begins[intervals.served()]
    return list(kept)


def _some_cut(problem: Problem, candidates: Candidates, bottleneck: int) -> int:
    """Returns the bottleneck of one cut through alive candidates."""
    begin, worst = 0, 0
    for stage in range(problem.num_stages):
        ends = as_array(candidates[stage + 1])
        begins = np.asarray([begin])
        times = problem.stage_times(stage, begins, ends)
        good = problem.allowed(stage, begins, ends)[0] & (times <= bottleneck)
        # The last good end leaves least for the stages that follow.
        index = int(np.flatnonzero(good)[-1])
        worst = max(worst, int(times[index]))
        begin = int(ends[index])
    return worst


def reachable_bottleneck(problem: Problem, candidates: Candidates) -> tuple[int, Candidates] | None:
    """Finds the least bottleneck of any problem with times in `int64`."""
    low, high = least_possible(problem), problem.forever
    step = max(low // 8, 1)
    kept: Candidates | None = None
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


def least_possible(problem: Problem) -> int:
    """Returns a bottleneck below which there is certainly no cut."""
    if len(set(problem.kind_of_stage)) > 1:
        return 0
    prefix = problem.prefix(0)
    return max(-(-int(prefix[-1]) // problem.num_stages), int(np.diff(prefix).max()))
