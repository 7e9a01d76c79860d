"""The least bottleneck where greedy stages are optimal: problems with `Problem.monotone`.

There, every part of an allowed stage is allowed and takes no longer. So for a given bottleneck the
cut that makes each stage as long as it can be reaches at least as far as any other after every
stage (if every layer fits every device, see `singles_fit`), and a search over the bottleneck
finds the least one that works.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from pipemesh.partition.search.dense import Candidates
from pipemesh.partition.search.problem import Problem

_LISTED_NUMBERS = 3_000_000


class Greedy:
    """Longest stages under a bottleneck, from the front and from the back."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._first, self._last = (window.tolist() for window in problem.windows())
        # Plain lists: a binary search in one is several times faster than in an array.
        self._prefix: dict[int, list[int]] = {}
        self._positions: list[int] = problem.positions.tolist()
        self._walls = [0, *problem.barriers, problem.size]
        self._memory: tuple[list[int], list[int]] | None = None
        if problem.memory is not None:
            memory = problem.memory
            self._memory = (memory.parameters.tolist(), memory.activations.tolist())

    def _sums(self, stage: int) -> Any:
        kind = self._problem.kind_of_stage[stage]
        if kind not in self._prefix:
            sums = self._problem.times.prefix(kind)
            if (len(self._prefix) + 1) * sums.size > _LISTED_NUMBERS:
                return sums
            self._prefix[kind] = sums.tolist()
        return self._prefix[kind]

    def forward(self, bottleneck: int) -> tuple[list[int] | None, int]:
        """Makes each stage as long as possible, from the first to the last.

        Args:
            bottleneck: no stage may take longer.

        Returns:
            The farthest place of each boundary, or `None` if the last layer is out of reach, and
            the least bottleneck above the given one for which anything changes.
        """
        problem, reached = self._problem, [0]
        following = problem.forever
        begin = 0
        for stage in range(problem.num_stages):
            sums = self._sums(stage)
            most = self._last[stage + 1]
            if problem.max_layers is not None:
                longest = self._positions[begin] + problem.max_layers
                most = min(most, bisect_right(self._positions, longest) - 1)
            if problem.barriers:
                most = min(most, self._walls[bisect_right(self._walls, begin)])
            if self._memory is not None:
                most = self._memory_end(stage, begin, most)
            end = bisect_right(sums, sums[begin] + bottleneck, begin, max(most, begin) + 1) - 1
            if end < most:
                following = min(following, int(sums[end + 1] - sums[begin]))
            if end <= begin or end < self._first[stage + 1]:
                return None, following
            reached.append(end)
            begin = end
        return reached, following

    def _memory_end(self, stage: int, begin: int, most: int) -> int:
        assert self._memory is not None and self._problem.memory is not None
        parameters, activations = self._memory
        weight = self._problem.memory.activation_weight[stage]
        limit = self._problem.memory.limit
        assert limit is not None
        limit += parameters[begin] + weight * activations[begin]

        def held(end: int) -> int:
            return parameters[end] + weight * activations[end]

        if most <= begin or held(most) <= limit:
            return most
        return begin + bisect_right(range(begin, most + 1), limit, key=held) - 1

    def backward(self, bottleneck: int) -> list[int]:
        """Makes each stage as long as possible, from the last to the first.

        Args:
            bottleneck: no stage may take longer; some cut must exist.

        Returns:
            The nearest place of each boundary.
        """
        problem = self._problem
        end = problem.size
        reached = [end]
        for stage in reversed(range(problem.num_stages)):
            sums = self._sums(stage)
            least = max(self._first[stage], 0)
            if problem.max_layers is not None:
                longest = self._positions[end] - problem.max_layers
                least = max(least, bisect_left(self._positions, longest))
            if problem.barriers:
                least = max(least, self._walls[bisect_left(self._walls, end) - 1])
            least = max(least, bisect_left(sums, sums[end] - bottleneck, 0, end))
            if self._memory is not None:
                least = self._memory_begin(stage, least, end)
            end = least
            reached.append(end)
        reached.reverse()
        return reached

    def _memory_begin(self, stage: int, least: int, end: int) -> int:
        assert self._memory is not None and self._problem.memory is not None
        parameters, activations = self._memory
        weight = self._problem.memory.activation_weight[stage]
        limit = self._problem.memory.limit
        assert limit is not None
        limit = parameters[end] + weight * activations[end] - limit

        def held(begin: int) -> int:
            return parameters[begin] + weight * activations[begin]

        return least + bisect_left(range(least, end), limit, key=held)


UNDECIDED: tuple[int, Candidates] = (-1, [])
"""What `greedy_bottleneck` returns where greedy stages prove nothing."""


def singles_fit(problem: Problem) -> int | None:
    """The least bottleneck under which every layer alone is an allowed stage on every device.

    Greedy stages are optimal only from there on. Below, a long stage can leave the next device
    with a layer that it cannot take, while a shorter one would have left it a smaller layer.

    Args:
        problem: a monotone problem.

    Returns:
        The bottleneck, or `None` if some layer alone breaks the memory limit somewhere.
    """
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
    """Finds the least bottleneck of a monotone problem in which `singles_fit` is not `None`.

    Args:
        problem: the problem, one stage a device.

    Returns:
        The bottleneck and, for each boundary, all places where an allowed cut may have it; `None`
        if there is no allowed cut; `UNDECIDED` if the bottleneck is below `singles_fit`.
    """
    greedy = Greedy(problem)
    stages = range(problem.num_stages)

    def attained(cut: list[int]) -> int:
        return max(_time(greedy, problem, stage, cut) for stage in stages)

    same = len(set(problem.kind_of_stage)) == 1
    prefix: Any = problem.prefix(0)
    low = singles_fit(problem)
    assert low is not None
    if same:
        low = max(low, -(-int(prefix[-1]) // problem.num_stages))
    # The least bottleneck is often this bound itself, where one layer outweighs all the rest.
    step, high = 0, None
    while high is None:
        trial = min(low + step, problem.forever)
        cut, following = greedy.forward(trial)
        if cut is not None:
            high = attained(cut)
            if not same and step == 0:
                # Below, some layers fit some devices only, and greedy is no proof.
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
    candidates: Candidates = [
        range(begin, end + 1) for begin, end in zip(greedy.backward(high), ends, strict=True)
    ]
    return high, candidates


def _time(greedy: Greedy, problem: Problem, stage: int, cut: list[int]) -> int:
    sums = greedy._sums(stage)  # pyright: ignore[reportPrivateUsage]
    return int(sums[cut[stage + 1]] - sums[cut[stage]])
