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
            return longest_stages(problem, bottleneck)[0] is not None
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
        times = problem.stage_times(stage, begin[:, None], end[None, :])
        worst = np.maximum(best[:, None], times)
        worst = np.where(problem.allowed(stage, begin, end), worst, bound)
        best = np.minimum(worst.min(axis=0), bound)
    least = int(best[0])
    return least if least < below else None


def longest_stages(problem: Problem, bottleneck: int) -> tuple[list[int] | None, int]:
    """Makes each stage as long as a bottleneck allows, from the first to the last.

    Returns the place of each boundary, None if the last layer is out of reach, and the next
    bottleneck that moves one.
    """
    first, last = problem.windows()
    reached, following = [0], problem.forever
    for stage in range(problem.num_stages):
        begin, times = reached[-1], problem.prefix(stage)
        most = min(int(last[stage + 1]), problem.last_wall(begin))
        most = _longest_in_memory(problem, stage, begin, most)
        end = min(most, int(search(times, times[begin] + bottleneck, "right")) - 1)
        if end < most:
            following = min(following, int(times[end + 1] - times[begin]))
        if end <= begin or end < first[stage + 1]:
            return None, following
        reached.append(end)
    return reached, following


def _longest_in_memory(problem: Problem, stage: int, begin: int, most: int) -> int:
    memory = problem.memory
    if memory is None or most <= begin:
        return most

    def too_large(end: int) -> bool:
        return int(memory.units(stage, begin, end)) > (memory.limit or 0)

    return begin + bisect_left(range(begin, most + 1), True, key=too_large) - 1


def earliest_places(problem: Problem, bottleneck: int) -> list[int]:
    """Returns the first place of each boundary from which compute time, and the number of layers of
    a stage, permit to reach the end.
    """
    first, _ = problem.windows()
    places = [problem.size]
    for stage in reversed(range(problem.num_stages)):
        times = problem.prefix(stage)
        place = int(search(times, times[places[-1]] - bottleneck, "left"))
        if problem.max_layers is not None:
            longest = problem.positions[places[-1]] - problem.max_layers
            place = max(place, int(search(problem.positions, longest, "left")))
        places.append(max(place, int(first[stage])))
    return places[::-1]


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

    def attained(cut: list[int]) -> int:
        prefixes = map(problem.prefix, range(problem.num_stages))
        return max(
            int(times[end] - times[begin])
            for times, begin, end in zip(prefixes, cut, cut[1:], strict=False)
        )

    alike = len(set(problem.kind_of_stage)) == 1
    low, longest = singles_fit(problem), int(np.diff(problem.prefix(0)).max())
    assert low is not None
    low = max(low, least_possible(problem))
    # The least bottleneck is often this bound itself, where one layer outweighs all the rest.
    step, high = 0, None
    while high is None:
        cut, following = longest_stages(problem, min(low + step, problem.forever))
        if cut is not None:
            high = attained(cut)
            if not alike and step == 0:
                # Below, some layers fit some devices only.
                return UNDECIDED
        elif following >= problem.forever:
            return None
        else:
            low, step = max(following, low), max(2 * step, longest, 1)
    while low < high:
        cut, following = longest_stages(problem, (low + high) // 2)
        if cut is None:
            low = following
        else:
            high = attained(cut)
    high = problem.tied(high)
    ends, _ = longest_stages(problem, high)
    assert ends is not None
    begins = earliest_places(problem, high)
    return high, [range(begin, end + 1) for begin, end in zip(begins, ends, strict=True)]


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


def reachable_bottleneck(problem: Problem, candidates: Candidates) -> tuple[int, Candidates] | None:
    """Finds the least bottleneck of any problem with times in `int64`."""
    low, high = least_possible(problem), problem.forever
    step = max(low // 8, 1)
    kept: Candidates | None = None
    while kept is None:
        trial = min(low + step, problem.forever)
        kept = alive(problem, candidates, trial)
        if kept is not None:
            high = trial
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
            kept, high = fewer, trial
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
