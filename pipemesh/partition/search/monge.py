"""Least sum of squares for monotone problems: row minima that move one way.

Over the places i of one boundary (columns) and j of the next (rows), the sums
`total[i] + time(i, j)^2` form a Monge array, because a square is convex and the time is a
difference of prefix sums. So the best column never moves left from one row to the next: a few
rows are searched whole, and the rows between them only between the columns found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipemesh.partition.integers import Ints
from pipemesh.partition.search.dense import Candidates, as_array, follow
from pipemesh.partition.search.problem import Problem

_STRIDE = 12
_BLOCK_NUMBERS = 2_000_000


def monge_squares(
    problem: Problem, candidates: Candidates, bottleneck: int, dtype: Any, top: Any
) -> tuple[list[int], Any] | None:
    """Finds the cut with the least sum of squared stage times.

    Args:
        problem: a monotone problem, one stage a device.
        candidates: places of each boundary.
        bottleneck: no stage may take longer.
        dtype: of the sums, `int64` or `float64`.
        top: more than any sum, in the same dtype.

    Returns:
        The S + 1 boundaries and the sum, or `None` if no cut is allowed.
    """
    total: Ints = np.zeros(1, dtype=dtype)
    choices: list[Ints] = []
    limited = bool(problem.memory or problem.max_layers or problem.barriers)
    for stage in range(problem.num_stages):
        begin, end = as_array(candidates[stage]), as_array(candidates[stage + 1])
        if not begin.size or not end.size:
            return None
        prefix = problem.prefix(stage)
        starts, finals = prefix[begin], prefix[end]
        low = np.searchsorted(starts, finals - bottleneck, side="left")
        if limited:
            last = problem.last_end(stage, begin)
            low = np.maximum(low, np.searchsorted(last, end, side="left"))
        high = np.searchsorted(begin, end, side="left") - 1
        total, choice = _row_minima(total, starts, finals, low, high, top)
        choices.append(choice)
    if total[0] >= top:
        return None
    return follow(candidates, choices), total[0]


def _row_minima(
    total: Ints, starts: Ints, finals: Ints, low: Ints, high: Ints, top: Any
) -> tuple[Ints, Ints]:
    rows = int(finals.size)
    best = np.full(rows, top, dtype=total.dtype)
    choice = np.zeros(rows, dtype=np.int64)
    stride = 1
    while stride * _STRIDE < rows:
        stride *= _STRIDE
    done = np.zeros(0, dtype=np.int64)
    while stride:
        if done.size:
            here = np.arange(0, rows, stride)
            here = here[here % (stride * _STRIDE) != 0]
            after = here // (stride * _STRIDE)
            # A row without any allowed column says nothing about its neighbours.
            some = best[done] < top
            left = np.maximum.accumulate(np.where(some, choice[done], 0))
            right = np.minimum.accumulate(np.where(some, choice[done], starts.size)[::-1])[::-1]
            right = np.append(right, starts.size)
            begin = np.maximum(low[here], left[after])
            end = np.minimum(high[here], right[after + 1])
        else:
            here = np.arange(0, rows, stride)
            begin, end = low[here], high[here]
        block = max(_BLOCK_NUMBERS // max(int((end - begin).max(initial=0)) + 1, 1), 1)
        for at in range(0, int(here.size), block):
            part = slice(at, at + block)
            best[here[part]], choice[here[part]] = _minima(
                total, starts, finals[here[part]], begin[part], end[part], top
            )
        done = np.arange(0, rows, stride)
        stride //= _STRIDE
    return best, choice


def _minima(
    total: Ints, starts: Ints, finals: Ints, begin: Ints, end: Ints, top: Any
) -> tuple[Ints, Ints]:
    width = int((end - begin).max(initial=-1)) + 1
    if width <= 0:
        return np.full(finals.size, top, dtype=total.dtype), np.zeros(finals.size, np.int64)
    columns = begin[:, None] + np.arange(width)
    outside = columns > end[:, None]
    np.minimum(columns, total.size - 1, out=columns)
    times = finals[:, None] - starts[columns]
    if total.dtype != np.int64:
        times = times.astype(total.dtype)
    sums = total[columns] + times * times
    sums[outside] = top
    picked = np.argmin(sums, axis=1)
    index = np.arange(finals.size)
    return np.minimum(sums[index, picked], top), columns[index, picked]
