"""Among all cuts with the least bottleneck, the one with the least sum of squares.

Three steps: a good cut inside a narrow corridor gives an upper bound; a lower bound on any cut
through a given boundary place removes the places that cannot beat it; a dynamic program over the
rest finds the optimum. README.md says why none of the three can lose it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from pipemesh.partition.costs import Floats
from pipemesh.partition.integers import Ints, search
from pipemesh.partition.search.dense import (
    Candidates,
    as_array,
    infinity,
    least_squares,
    pairs,
    squares_dtype,
)
from pipemesh.partition.search.monge import monge_squares
from pipemesh.partition.search.problem import Problem

DENSE_PAIRS = 300_000
"""Up to so many pairs of boundaries, nothing is pruned before the dense program."""

_CORRIDOR = 16
# Ratios between the tension in front of and behind a boundary that the bounds try; any set gives
# valid bounds, a finer one removes a few more places.
_LEANS = tuple(float(lean) for lean in np.geomspace(1 / 32, 32, 11))
# The bounds are floats; this much more than their rounding error is left between them.
_MARGIN = 1e-9
# Relative rounding error of the bound on all cuts, generously.
_ROUNDING = 1e-11


def even_cut(problem: Problem, candidates: Candidates, bottleneck: int) -> list[int]:
    """Finds the allowed cut with the least sum of squared stage times.

    Args:
        problem: the problem, one stage a device.
        candidates: places of each boundary; every allowed cut must run through them.
        bottleneck: no stage may take longer; some cut must be allowed.

    Returns:
        The S + 1 boundaries.
    """
    if pairs(candidates) > DENSE_PAIRS:
        bound = _Bound(problem, candidates, bottleneck)
        width, found = _CORRIDOR, None
        centers = bound.centers()
        while found is None:
            found = _search(problem, _corridor(candidates, centers, width), bottleneck)
            width *= 4
        # Once more around what was found: a tighter bound removes more places.
        around = _corridor(candidates, np.asarray(found[0]), _CORRIDOR)
        again = _search(problem, around, bottleneck)
        if again is not None and again[1] < found[1]:
            found = again
        if bound.proves(found[1]):
            return found[0]
        candidates = bound.prune(candidates, float(found[1]))
    found = _search(problem, candidates, bottleneck)
    assert found is not None
    return found[0]


def _search(
    problem: Problem, candidates: Candidates, bottleneck: int
) -> tuple[list[int], Any] | None:
    if problem.monotone and pairs(candidates) > DENSE_PAIRS:
        dtype = squares_dtype(problem, candidates, bottleneck)
        if dtype is object:
            dtype = np.float64
        top = infinity(dtype, problem, bottleneck)
        return monge_squares(problem, candidates, bottleneck, dtype, top)
    return least_squares(problem, candidates, bottleneck)


def _corridor(candidates: Candidates, centers: Ints, width: int) -> Candidates:
    near: Candidates = []
    for places, center in zip(candidates, centers, strict=True):
        middle = bisect_left(places, int(center))
        low = max(min(middle - width, len(places) - 1 - width), 0)
        near.append(places[low : middle + width + 1])
    return near


class _Bound:
    """Lower bounds on the sum of squares, by pricing the layers.

    For any tension z > 0, a stage of time t on a device of speed v has
    t^2 >= 2 z v t - (z v)^2, the tangent at t = z v. Summed over stages, the first term is a
    price for each layer and each crossed boundary, wherever the cuts are. A layer that takes
    longer than z (equal devices only) may cost t^2 + z^2 instead: its stage cannot be shorter.
    """

    def __init__(self, problem: Problem, candidates: Candidates, bottleneck: int) -> None:
        self._bottleneck = float(bottleneck)
        kinds = problem.times.kinds
        used = sorted(set(problem.kind_of_stage))
        self._speeds: Floats = np.asarray([float(kinds[kind][0]) for kind in problem.kind_of_stage])
        self._speeds /= self._speeds.max()
        # Stages that recompute differ in more than speed: take each layer at its cheapest.
        cheapest: Floats | None = None
        fastest = max(float(kinds[kind][0]) for kind in used)
        for again in sorted({kinds[kind][1] for kind in used}):
            kind = next(kind for kind in used if kinds[kind][1] == again)
            load = np.diff(problem.times.prefix(kind)).astype(np.float64)
            load *= float(kinds[kind][0]) / fastest
            cheapest = load if cheapest is None else np.minimum(cheapest, load)
        assert cheapest is not None
        self._loads = cheapest
        self._equal = len(used) == 1
        stages = problem.num_stages
        self._waits: Floats = np.zeros(stages + 1)
        self._transfers: Floats | None = None
        transfers = problem.times.transfers
        if transfers is not None and not problem.overlapped:
            self._transfers = transfers.astype(np.float64)
            self._waits[:] = [float(transfers[as_array(places)].min()) for places in candidates]
        ordered = np.sort(self._loads)
        self._ordered = ordered
        self._ordered_sums = np.concatenate([[0.0], np.cumsum(ordered)])
        self._ordered_squares = np.concatenate([[0.0], np.cumsum(ordered * ordered)])
        self._tension = self._best_tension()

    def _stage_terms(self, tension: float) -> Floats:
        """What each stage adds, its transfers at their least included."""
        pull = tension * self._speeds
        capped = np.minimum(pull, self._bottleneck)
        terms = capped * capped - 2 * pull * capped
        return terms + 2 * pull * (self._waits[:-1] + self._waits[1:])

    def _prices(self, tension: float) -> Floats:
        """Summed prices of the layers before each boundary."""
        prices = 2 * tension * self._loads
        if self._equal and tension <= self._bottleneck:
            large = self._loads > tension
            prices[large] = self._loads[large] ** 2 + tension**2
        return np.concatenate([[0.0], np.cumsum(prices)])

    def _whole(self, tension: float) -> float:
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
            if self._whole(left) < self._whole(right):
                low = left
            else:
                high = right
        return (low + high) / 2

    def centers(self) -> Ints:
        """Where the boundaries lie if layers could be cut anywhere."""
        tension = self._tension
        # A large layer fills a stage of its own, small ones fill stages up to the tension.
        filled: Ints = np.minimum(self._loads, tension) if self._equal else self._loads
        room = np.minimum(tension * self._speeds, self._bottleneck) * self._speeds
        reached = np.concatenate([[0.0], np.cumsum(room)])
        reached *= filled.sum() / reached[-1]
        sums = np.concatenate([[0.0], np.cumsum(filled)])
        found: Ints = search(sums, reached, side="left")
        after: Ints = np.minimum(np.maximum(found, 1), sums.size - 1)
        nearer: Ints = sums[after] - reached > reached - sums[after - 1]
        # Every stage takes a layer, also where many layers cost nothing.
        index: Ints = np.arange(int(reached.size))
        apart: Ints = np.maximum.accumulate(after - nearer - index) + index
        return np.minimum(apart, sums.size - reached.size + index)

    def proves(self, squares: Any) -> bool:
        """Whether no cut can have a smaller sum of squares.

        Args:
            squares: the sum of squares of some allowed cut.

        Returns:
            Whether the lower bound on all cuts says so.
        """
        least = self._whole(self._tension) * (1 - _ROUNDING)
        # Between two whole numbers there is no other sum.
        return least > squares - 1 if isinstance(squares, (int, np.integer)) else least >= squares

    def prune(self, candidates: Candidates, upper: float) -> Candidates:
        """Removes places through which every cut has a larger sum of squares.

        Args:
            candidates: places of each boundary.
            upper: the sum of squares of some allowed cut.

        Returns:
            Fewer candidates.
        """
        stages = self._speeds.size
        upper *= 1 + _MARGIN
        gap = upper - self._whole(self._tension)
        spread = float(np.sqrt(max(gap, upper * _MARGIN) / float((self._speeds**2).sum())))
        first = np.asarray([int(places[0]) for places in candidates])
        last = np.asarray([int(places[-1]) for places in candidates])
        for lean in _LEANS:
            for sign in (1.0, -1.0):
                front = self._tension + sign * spread * lean
                behind = self._tension - sign * spread / lean
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
        kept: Candidates = []
        for boundary, places in enumerate(candidates):
            begin = bisect_left(places, int(first[boundary]))
            end = bisect_right(places, int(last[boundary]))
            places = places[begin:end]
            if self._transfers is not None and 0 < boundary < stages:
                places = as_array(places)
                pull = 2 * self._tension * float(self._speeds[boundary - 1 : boundary + 1].sum())
                more = self._transfers[places] - self._waits[boundary]
                places = places[more * pull <= gap]
            kept.append(places)
        return kept
