"""Exact dynamic programs over every pair of candidate boundaries."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pipemesh.partition.integers import Ints, search
from pipemesh.partition.search.problem import Problem

Places = Ints | range
"""Where one boundary may be, rising; a range where all places in between are possible."""

Candidates = list[Places]
"""The places of each of the S + 1 boundaries."""

_BLOCK = 256
_INT64_SQUARES = 2**62
_FEW_PAIRS = 300_000


def as_array(places: Places) -> Ints:
    """Writes out the places of one boundary.

    Args:
        places: where it may be.

    Returns:
        The same as an array.
    """
    return np.arange(places.start, places.stop) if isinstance(places, range) else places


def pairs(candidates: Candidates) -> int:
    """Counts the pairs of consecutive candidates.

    Args:
        candidates: places of each boundary.

    Returns:
        How many stages a dense program looks at.
    """
    return sum(len(left) * len(right) for left, right in itertools.pairwise(candidates))


def least_bottleneck(problem: Problem, candidates: Candidates, below: int) -> int | None:
    """Finds the smallest bottleneck over all allowed cuts through the candidates.

    Args:
        problem: the problem, one stage a device.
        candidates: places of each boundary.
        below: only stages that take less count.

    Returns:
        The bottleneck, or `None` if there is no such cut.
    """
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
    found = int(best[0])
    return found if found < below else None


def squares_dtype(problem: Problem, candidates: Candidates, bottleneck: int) -> Any:
    """Picks numbers for sums of squares: exact ones wherever that is affordable.

    Args:
        problem: the problem.
        candidates: places of each boundary.
        bottleneck: no stage takes longer.

    Returns:
        `int64`, `object` (Python integers) or `float64`.
    """
    if 2 * problem.num_stages * bottleneck * bottleneck < _INT64_SQUARES:
        return np.int64
    return object if pairs(candidates) <= _FEW_PAIRS else np.float64


def infinity(dtype: Any, problem: Problem, bottleneck: int) -> Any:
    """A number above every sum of squares, to which one more square can be added.

    Args:
        dtype: of the sums.
        problem: the problem.
        bottleneck: no stage takes longer.

    Returns:
        The number.
    """
    if dtype is np.float64:
        return np.inf
    return problem.num_stages * bottleneck * bottleneck + 1


def least_squares(
    problem: Problem, candidates: Candidates, bottleneck: int, dtype: Any = None
) -> tuple[list[int], Any] | None:
    """Finds the cut with the least sum of squared stage times.

    Args:
        problem: the problem, one stage a device.
        candidates: places of each boundary.
        bottleneck: no stage may take longer.
        dtype: of the sums; chosen by size if `None`.

    Returns:
        The S + 1 boundaries and the sum, or `None` if no cut is allowed.
    """
    dtype = dtype or squares_dtype(problem, candidates, bottleneck)
    top = infinity(dtype, problem, bottleneck)
    total = np.zeros(1, dtype=dtype)
    choices: list[Ints] = []
    for stage in range(problem.num_stages):
        begin, end = as_array(candidates[stage]), as_array(candidates[stage + 1])
        if not begin.size or not end.size:
            return None
        best = np.full(end.size, top, dtype=dtype)
        choice = np.zeros(end.size, dtype=np.int64)
        prefix = problem.prefix(stage)
        starts = prefix[begin]
        for low in range(0, end.size, _BLOCK):
            rows = end[low : low + _BLOCK]
            # Stages that compute for longer than the bottleneck are left out in one piece.
            left = int(search(starts, prefix[rows[0]] - bottleneck, side="left"))
            right = int(search(begin, rows[-1], side="left"))
            if left >= right:
                continue
            columns = begin[left:right]
            times = problem.stage_times(stage, columns[:, None], rows[None, :])
            allowed = problem.allowed(stage, columns, rows) & (times <= bottleneck)
            if dtype is not np.int64:
                times = times.astype(dtype)
            sums = np.where(allowed, total[left:right, None] + times * times, top)
            picked = np.argmin(sums, axis=0)
            choice[low : low + _BLOCK] = picked + left
            best[low : low + _BLOCK] = np.minimum(sums[picked, np.arange(rows.size)], top)
        total = best
        choices.append(choice)
    if total[0] >= top:
        return None
    return follow(candidates, choices), total[0]


def follow(candidates: Candidates, choices: list[Ints]) -> list[int]:
    """Goes back from the last boundary to the first along the choices made.

    Args:
        candidates: places of each boundary; the last boundary has one.
        choices: for each stage, by candidate of its end, the candidate of its begin.

    Returns:
        The places of all boundaries, rising.
    """
    index, boundaries = 0, [int(candidates[-1][0])]
    for stage in reversed(range(len(choices))):
        index = int(choices[stage][index])
        boundaries.append(int(candidates[stage][index]))
    boundaries.reverse()
    return boundaries
