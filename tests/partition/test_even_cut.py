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


@pytest.mark.parametrize(
    ("costs", "centers", "times"),
    [
        ([1.0] * 12, [0, 3, 6, 9, 12], [3] * 4),
        # A large layer fills a stage alone.
        ([1.0] * 6 + [50] + [1.0] * 6, [0, 3, 6, 7, 10, 13], [50, 3, 3, 3, 3]),
    ],
)
def test_the_bound_is_sharp(costs, centers, times):
    problem = problem_of(costs, len(times))
    unit, bottleneck = max(times), optimum(problem)
    bound = SquaresBound(problem, places_of(problem), bottleneck)
    assert bound.centers().tolist() == centers
    least = sum((bottleneck * time // unit) ** 2 for time in times)
    assert bound.least() == pytest.approx(least, rel=1e-11)
    kept = bound.prune(places_of(problem), float(least))
    assert [list(column) for column in kept] == [[place] for place in centers]


@given(
    problems | monotone_problems,
    st.integers(0, 20),
    st.sampled_from([np.int64, object, np.float64]),
    st.sampled_from([0, 10**6]),
    st.sampled_from([1, 3, 256]),
)
def test_least_squares_in_numbers_and_blocks_of_all_kinds(problem, more, dtype, all_pairs, block):
    best = optimum(problem)
    if best is None:
        return
    sums, places = squares_by_cut(problem, best + more), places_of(problem)
    with mock.patch.multiple(
        searched, _ALL_PAIRS=all_pairs, _BLOCK=block, squares_dtype=lambda *_: dtype
    ):
        cut, total = least_squares(problem, places, best + more)
        assert total == sums[tuple(cut)] == min(sums.values())
        assert not best or least_squares(problem, places, best - 1) is None


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
