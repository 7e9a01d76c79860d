"""The most even of all cuts with the least bottleneck: that with the least sum of squared times.

A dynamic program over the places of the boundaries finds it. Of a large problem, two steps leave
few places: a good cut inside a narrow corridor gives an upper bound, and a lower bound on any cut
through a place removes it if it cannot beat the upper bound. README.md says why neither can lose
the best cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from pipemesh.partition.costs import Floats, Ints, expand, search
from pipemesh.partition.problem import FEW_PAIRS, Candidates, Problem, as_array, num_pairs

_BLOCK = 256
# Up to so many pairs of places of two neighbouring boundaries, looking at all of them is fastest.
_ALL_PAIRS = 20_000
_INT64_SQUARES = 2**62
_CORRIDOR = 16
# The bounds are floats; this much more than their rounding error is left between them.
_MARGIN = 1e-9


def even_cut(problem: Problem, candidates: Candidates, bottleneck: int) -> list[int]:
    """Finds the allowed cut with the least sum of squared stage times, within the candidates."""
    if num_pairs(candidates) > FEW_PAIRS:
        bound = SquaresBound(problem, candidates, bottleneck)
        width, cut_and_squares = _CORRIDOR, None
        centers = bound.centers()
        while cut_and_squares is None:
            near = _corridor(candidates, centers, width)
            cut_and_squares = least_squares(problem, near, bottleneck)
            width *= 4
        candidates = bound.prune(candidates, float(cut_and_squares[1]))
    cut_and_squares = least_squares(problem, candidates, bottleneck)
    assert cut_and_squares is not None
    return cut_and_squares[0]


def _corridor(candidates: Candidates, centers: Ints, width: int) -> Candidates:
    """Keeps the places near the centers."""
    near: Candidates = []
    for places, center in zip(candidates, centers, strict=True):
        middle = bisect_left(places, int(center))
        low = max(min(middle - width, len(places) - 1 - width), 0)
        near.append(places[low : middle + width + 1])
    return near


def squares_dtype(problem: Problem, candidates: Candidates, bottleneck: int) -> Any:
    """Returns `int64` if sums of squares fit, else Python integers if they are few, else floats."""
    if 2 * problem.num_stages * bottleneck * bottleneck < _INT64_SQUARES:
        return np.int64
    return object if num_pairs(candidates) <= FEW_PAIRS else np.float64


def infinity(dtype: Any, problem: Problem, bottleneck: int) -> Any:
    """Returns a number above every sum of squares, to which one more square can be added."""
    if dtype is np.float64:
        return np.inf
    return problem.num_stages * bottleneck * bottleneck + 1


def least_squares(
    problem: Problem, candidates: Candidates, bottleneck: int
) -> tuple[list[int], Any] | None:
    """Returns the cut with the least sum of squared stage times, and the sum, if there is one."""
    dtype = squares_dtype(problem, candidates, bottleneck)
    top = infinity(dtype, problem, bottleneck)
    total: Ints = np.zeros(1, dtype=dtype)
    choices: list[Ints] = []
    for stage in range(problem.num_stages):
        begin, end = as_array(candidates[stage]), as_array(candidates[stage + 1])
        if problem.monotone and begin.size * end.size > _ALL_PAIRS:
            total, choice = _of_monotone(problem, stage, total, begin, end, bottleneck, top)
        else:
            total, choice = _of_all_pairs(problem, stage, total, begin, end, bottleneck, top)
        choices.append(choice)
    if total[0] >= top:
        return None
    return follow(candidates, choices), total[0]


def _of_all_pairs(
    problem: Problem, stage: int, total: Ints, begin: Ints, end: Ints, bottleneck: int, top: Any
) -> tuple[Ints, Ints]:
    """Returns the least sum for each end of a stage, and its begin, out of all pairs."""
    best = np.full(end.size, top, dtype=total.dtype)
    choice = np.zeros(end.size, dtype=np.int64)
    prefix = problem.prefix(stage)
    starts = prefix[begin]
    for low in range(0, end.size, _BLOCK):
        rows = end[low : low + _BLOCK]
        # Skip all stages that compute for longer than the bottleneck.
        left = int(search(starts, prefix[rows[0]] - bottleneck, side="left"))
        right = int(search(begin, rows[-1], side="left"))
        if left >= right:
            continue
        columns = begin[left:right]
        times = problem.stage_times(stage, columns[:, None], rows[None, :])
        allowed = problem.allowed(stage, columns, rows) & (times <= bottleneck)
        if total.dtype != np.int64:
            times = times.astype(total.dtype)
        sums = np.where(allowed, total[left:right, None] + times * times, top)
        picked = np.argmin(sums, axis=0)
        choice[low : low + _BLOCK] = picked + left
        best[low : low + _BLOCK] = np.minimum(sums[picked, np.arange(rows.size)], top)
    return best, choice


def _of_monotone(
    problem: Problem, stage: int, total: Ints, begin: Ints, end: Ints, bottleneck: int, top: Any
) -> tuple[Ints, Ints]:
    """Returns the same for a monotone problem from few pairs."""
    # Over the begins i (columns) and the ends j (rows), the sums `total[i] + time(i, j)^2` form a
    # Monge array, because a square is convex and the time is a difference of prefix sums. So the
    # best column never moves left from one row to the next: half of the rows are searched between
    # the columns of the other half, of which half was searched before.
    prefix = problem.prefix(stage)
    starts, finals = prefix[begin], prefix[end]
    low = search(starts, finals - bottleneck, side="left")
    low = np.maximum(low, search(problem.last_end(stage, begin), end, side="left"))
    high = search(begin, end, side="left") - 1
    best = np.full(end.size, top, dtype=total.dtype)
    choice = np.zeros(end.size, dtype=np.int64)
    stride = 1 << (int(end.size).bit_length() - 1)
    while stride:
        rows = np.arange(stride - 1, end.size, 2 * stride)
        owner, columns = expand(low[rows], high[rows])
        times = finals[rows[owner]] - starts[columns]
        if total.dtype != np.int64:
            times = times.astype(total.dtype)
        sums = total[columns] + times * times
        firsts = np.flatnonzero(np.diff(owner, prepend=-1))
        found = rows[owner[firsts]]
        best[found] = np.minimum(np.minimum.reduceat(sums, firsts), top)
        is_least = np.flatnonzero(sums == best[rows[owner]])[::-1]
        choice[rows[owner[is_least]]] = columns[is_least]  # The last one written is the leftmost.
        # A row without any allowed column says nothing about its neighbours.
        is_known = best < top
        low = np.maximum(low, np.maximum.accumulate(np.where(is_known, choice, 0)))
        before = np.where(is_known, choice, begin.size)[::-1]
        high = np.minimum(high, np.minimum.accumulate(before)[::-1])
        stride //= 2
    return best, choice


def follow(candidates: Candidates, choices: list[Ints]) -> list[int]:
    """Follows for each stage the chosen begin of each end, from the last boundary to the first."""
    index, boundaries = 0, [int(candidates[-1][0])]
    for stage in reversed(range(len(choices))):
        index = int(choices[stage][index])
        boundaries.append(int(candidates[stage][index]))
    boundaries.reverse()
    return boundaries


class SquaresBound:
    """Lower bounds on the sum of squares, by pricing the layers.

    For any tension z > 0, a stage of time t on a device of speed v has t^2 >= 2 z v t - (z v)^2,
    the tangent at t = z v. Summed over stages, the first term is a price for each layer, wherever
    the cuts are. A layer that takes longer than z (equal devices only) may cost t^2 + z^2 instead:
    its stage cannot be shorter. Transfers only add to a stage's time, so the bounds ignore them.
    """

    def __init__(self, problem: Problem, candidates: Candidates, bottleneck: int) -> None:
        self._bottleneck = float(bottleneck)
        kinds = problem.times.kinds
        self._speeds: Floats = np.asarray([float(kinds[kind][0]) for kind in problem.kind_of_stage])
        self._speeds /= self._speeds.max()
        self._loads = problem.cheapest_loads()
        self._equal = len(set(problem.kind_of_stage)) == 1
        ordered = np.sort(self._loads)
        self._ordered = ordered
        self._ordered_sums = np.concatenate([[0.0], np.cumsum(ordered)])
        self._ordered_squares = np.concatenate([[0.0], np.cumsum(ordered * ordered)])
        self._tension = self._best_tension()

    def _stage_terms(self, tension: float) -> Floats:
        """Returns what each stage adds to the prices of its layers."""
        pull = tension * self._speeds
        capped = np.minimum(pull, self._bottleneck)
        return capped * capped - 2 * pull * capped

    def _prices(self, tension: float) -> Floats:
        """Returns the summed prices of the layers before each boundary."""
        prices = 2 * tension * self._loads
        if self._equal and tension <= self._bottleneck:
            large = self._loads > tension
            prices[large] = self._loads[large] ** 2 + tension**2
        return np.concatenate([[0.0], np.cumsum(prices)])

    def least(self, tension: float | None = None) -> float:
        """Returns the bound on all cuts at a tension, by default at the best one."""
        if tension is None:
            tension = self._tension
        total = 2 * tension * float(self._ordered_sums[-1])
        if self._equal and tension <= self._bottleneck:
            small = int(search(self._ordered, tension, side="right"))
            total = 2 * tension * float(self._ordered_sums[small])
            total += float(self._ordered_squares[-1] - self._ordered_squares[small])
            total += tension**2 * (self._ordered.size - small)
        return total + float(self._stage_terms(tension).sum())

    def _best_tension(self) -> float:
        low, high = 0.0, 2 * self._bottleneck / float(self._speeds.min())
        # The bound is concave in the tension; any tension is valid, so the search may be rough.
        for _ in range(60):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self.least(left) < self.least(right):
                low = left
            else:
                high = right
        return (low + high) / 2

    def centers(self) -> Ints:
        """Returns the places of the boundaries if layers could be divided, as whole layers."""
        tension = self._tension
        # A large layer fills a stage of its own, small ones fill stages up to the tension.
        filled: Ints = np.minimum(self._loads, tension) if self._equal else self._loads
        room = np.minimum(tension * self._speeds, self._bottleneck) * self._speeds
        reached = np.concatenate([[0.0], np.cumsum(room)])
        reached *= filled.sum() / reached[-1]
        sums = np.concatenate([[0.0], np.cumsum(filled)])
        after: Ints = np.minimum(np.maximum(search(sums, reached, side="left"), 1), sums.size - 1)
        nearer: Ints = sums[after] - reached > reached - sums[after - 1]
        # Every stage takes a layer, also where many layers cost nothing.
        index: Ints = np.arange(int(reached.size))
        apart: Ints = np.maximum.accumulate(after - nearer - index) + index
        return np.minimum(apart, sums.size - reached.size + index)

    def prune(self, candidates: Candidates, upper: float) -> Candidates:
        """Removes places through which every cut has a sum of squares above `upper`."""
        # In front of a boundary and behind it the tension may differ. A higher one in front bounds
        # the boundary's place from behind, a lower one from the front.
        upper *= 1 + _MARGIN
        gap = max(upper - self.least(), upper * _MARGIN)
        spread = float(np.sqrt(gap / float((self._speeds**2).sum())))
        first = np.asarray([int(places[0]) for places in candidates])
        last = np.asarray([int(places[-1]) for places in candidates])
        for sign in (1.0, -1.0):
            front, behind = self._tension + sign * spread, self._tension - sign * spread
            if front <= 0 or behind <= 0:
                continue
            before, after = self._prices(front), self._prices(behind)
            spent = np.concatenate([[0.0], np.cumsum(self._stage_terms(front))])
            left = np.cumsum(np.concatenate([[0.0], self._stage_terms(behind)[::-1]]))[::-1]
            # Place j can stay as boundary s if change[j] <= room[s].
            room = upper - float(after[-1]) - spent - left
            change = before - after
            if sign > 0:
                last = np.minimum(last, search(change, room, side="right") - 1)
            else:
                first = np.maximum(first, search(-change, -room, side="left"))
        return [
            places[bisect_left(places, int(begin)) : bisect_right(places, int(end))]
            for places, begin, end in zip(candidates, first, last, strict=True)
        ]
