"""Row minima that move one way, against all cuts one after the other."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.partition.search import monge
from pipemesh.partition.search.dense import infinity
from pipemesh.partition.search.monge import monge_squares
from tests.partition.search.problems import (
    cuts_of,
    monotone_problems,
    optimum,
    places_of,
    problem_of,
    squares,
)


@given(monotone_problems, st.integers(0, 20), st.sampled_from([np.int64, np.float64]))
def test_the_least_squares_under_a_bottleneck(problem, more, dtype):
    best = optimum(problem)
    if best is None:
        return
    bottleneck = best + more
    found = {cut: squares(times) for cut, times in cuts_of(problem, bottleneck)}
    top = infinity(dtype, problem, bottleneck)
    for stride, block in ((2, 1), (2, 3), (12, 2_000_000)):
        with mock.patch.multiple(monge, _STRIDE=stride, _BLOCK_NUMBERS=block):
            cut, total = monge_squares(problem, places_of(problem), bottleneck, dtype, top)
            assert total == found[tuple(cut)] == min(found.values())
            if best:
                assert monge_squares(problem, places_of(problem), best - 1, dtype, top) is None


@pytest.mark.parametrize("seed", range(4))
def test_strides_of_many_rows_find_what_a_scan_of_all_finds(seed):
    random = np.random.default_rng(seed)
    problem = problem_of(random.integers(0, 9, 400).tolist(), 3)
    prefix = problem.prefix(0).astype(object)
    bottleneck = int(prefix[-1])
    cut, total = monge_squares(
        problem, places_of(problem), bottleneck, np.int64, infinity(np.int64, problem, bottleneck)
    )
    ends = np.arange(1, 400)
    first = prefix[ends][:, None] ** 2
    second = (prefix[ends][None, :] - prefix[ends][:, None]) ** 2
    third = (prefix[-1] - prefix[ends])[None, :] ** 2
    sums = np.where(ends[:, None] < ends[None, :], first + second + third, bottleneck**2 * 3)
    assert total == sums.min() == sums[cut[1] - 1, cut[2] - 1]


def test_a_boundary_without_a_place_allows_no_cut():
    problem = problem_of([1.0] * 6, 3)
    places = [*places_of(problem)[:2], range(0), range(6, 7)]
    assert monge_squares(problem, places, 10, np.int64, 10**6) is None
