"""The searches for the most even cut, against all cuts one after the other."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition import even_cut as searched
from pipemesh.partition.even_cut import (
    SquaresBound,
    even_cut,
    infinity,
    least_squares,
    squares_dtype,
)
from tests.partition.problems import (
    cuts_of,
    monotone_problems,
    optimum,
    places_of,
    problem_of,
    problems,
    squares,
)


def squares_by_cut(problem, bottleneck):
    return {cut: squares(times) for cut, times in cuts_of(problem, bottleneck)}


@settings(max_examples=100)
@given(problems, st.sampled_from([-1, 300_000]), st.sampled_from([1, 2, 16]))
def test_no_allowed_cut_is_more_even(problem, few_pairs, corridor):
    best = optimum(problem)
    if best is None:
        return
    with mock.patch.multiple(searched, FEW_PAIRS=few_pairs, _CORRIDOR=corridor):
        cut = even_cut(problem, places_of(problem), best)
    sums = squares_by_cut(problem, best)
    assert sums[tuple(cut)] == min(sums.values())


@settings(max_examples=100)
@given(problems, st.integers(0, 10))
def test_bounds_keep_every_place_of_cuts_that_are_even_enough(problem, more):
    best = optimum(problem)
    if not best:
        return
    sums = squares_by_cut(problem, best + more)
    bound = SquaresBound(problem, places_of(problem), best + more)
    assert bound.least() <= min(sums.values()) * (1 + 1e-11)
    # From any allowed cut as the upper bound: of it, and of all that are better, every place stays.
    for upper in sorted(set(sums.values()))[:3]:
        kept = bound.prune(places_of(problem), float(upper))
        for cut, total in sums.items():
            if total <= upper:
                assert all(place in column for place, column in zip(cut, kept, strict=True))


def test_the_bound_on_equal_layers_leaves_one_cut():
    problem = problem_of([1.0] * 12, 4)
    bottleneck = optimum(problem)
    bound = SquaresBound(problem, places_of(problem), bottleneck)
    assert bound.least() == pytest.approx(4 * bottleneck**2, rel=1e-11)
    assert bound.centers().tolist() == [0, 3, 6, 9, 12]
    kept = bound.prune(places_of(problem), float(4 * bottleneck**2))
    assert [list(column) for column in kept] == [[0], [3], [6], [9], [12]]


def test_a_large_layer_fills_a_stage_alone():
    problem = problem_of([1.0] * 6 + [50] + [1.0] * 6, 5)
    bottleneck = optimum(problem)
    bound = SquaresBound(problem, places_of(problem), bottleneck)
    assert bound.centers().tolist() == [0, 3, 6, 7, 10, 13]
    squares_of_best = bottleneck**2 + 4 * (bottleneck * 3 // 50) ** 2
    assert bound.least() == pytest.approx(squares_of_best, rel=1e-11)


@given(problems, st.integers(0, 20), st.sampled_from([np.int64, object, np.float64, None]))
def test_least_squares_in_numbers_and_blocks_of_all_kinds(problem, more, dtype):
    best = optimum(problem)
    if best is None:
        return
    sums = squares_by_cut(problem, best + more)
    for block in (1, 3, 256):
        with mock.patch.multiple(searched, _BLOCK=block, _ALL_PAIRS=10**6):
            cut, total = least_squares(problem, places_of(problem), best + more, dtype)
        assert total == sums[tuple(cut)] == min(sums.values())
    if best:
        assert least_squares(problem, places_of(problem), best - 1, dtype) is None


@given(monotone_problems, st.integers(0, 20), st.sampled_from([np.int64, object, np.float64]))
def test_row_minima_that_move_one_way_find_the_least_squares(problem, more, dtype):
    best = optimum(problem)
    if best is None:
        return
    sums = squares_by_cut(problem, best + more)
    with mock.patch.object(searched, "_ALL_PAIRS", 0):
        cut, total = least_squares(problem, places_of(problem), best + more, dtype)
        assert total == sums[tuple(cut)] == min(sums.values())
        if best:
            assert least_squares(problem, places_of(problem), best - 1, dtype) is None


@pytest.mark.parametrize("seed", range(4))
def test_row_minima_of_many_rows_find_the_minimum_of_a_full_scan(seed):
    random = np.random.default_rng(seed)
    problem = problem_of(random.integers(0, 9, 400).tolist(), 3)
    prefix = problem.prefix(0).astype(object)
    bottleneck = int(prefix[-1])
    cut, total = least_squares(problem, places_of(problem), bottleneck, np.int64)
    ends = np.arange(1, 400)
    first = prefix[ends][:, None] ** 2
    second = (prefix[ends][None, :] - prefix[ends][:, None]) ** 2
    third = (prefix[-1] - prefix[ends])[None, :] ** 2
    sums = np.where(ends[:, None] < ends[None, :], first + second + third, bottleneck**2 * 3)
    assert total == sums.min() == sums[cut[1] - 1, cut[2] - 1]


@pytest.mark.parametrize("empty", [1, 2])
def test_a_boundary_without_places_allows_no_cut(empty):
    problem = problem_of([1.0] * 6, 3)
    places = places_of(problem)
    places[empty] = range(0)
    assert least_squares(problem, places, problem.forever) is None


def test_sums_of_squares_are_exact_where_that_is_affordable():
    problem = problem_of([1.0] * 6, 3)
    few, many = [range(1)] * 4, [range(400)] * 4
    assert squares_dtype(problem, many, 10**8) is np.int64
    assert squares_dtype(problem, few, 10**9) is object
    assert squares_dtype(problem, many, 10**9) is np.float64
    # An int64 must hold every sum and one square more.
    edge = next(
        b for b in range(876_000_000, 877_000_000, 1000) if squares_dtype(problem, few, b) is object
    )
    top = infinity(np.int64, problem, edge - 1000)
    assert 3 * (edge - 1000) ** 2 < top
    assert top + (edge - 1000) ** 2 < 2**63
    assert infinity(np.float64, problem, edge) == np.inf
