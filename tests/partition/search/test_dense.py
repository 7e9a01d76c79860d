"""Programs over every pair of boundaries, against all cuts one after the other."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.partition.search import dense
from pipemesh.partition.search.dense import (
    as_array,
    follow,
    infinity,
    least_bottleneck,
    least_squares,
    pairs,
    squares_dtype,
)
from tests.partition.search.problems import (
    cuts_of,
    optimum,
    places_of,
    problem_of,
    problems,
    squares,
)


@given(problems)
def test_the_least_bottleneck_and_none_below_it(problem):
    places, best = places_of(problem), optimum(problem)
    if best is None:
        assert places is None or least_bottleneck(problem, places, problem.forever) is None
        return
    assert least_bottleneck(problem, places, problem.forever) == best
    assert least_bottleneck(problem, places, best + 1) == best
    assert least_bottleneck(problem, places, best) is None


@given(problems, st.integers(0, 20), st.sampled_from([np.int64, object, np.float64, None]))
def test_the_least_squares_under_a_bottleneck_in_any_numbers_and_blocks(problem, more, dtype):
    best = optimum(problem)
    if best is None:
        return
    found = {cut: squares(times) for cut, times in cuts_of(problem, best + more)}
    for block in (1, 3, 256):
        with mock.patch.object(dense, "_BLOCK", block):
            cut, total = least_squares(problem, places_of(problem), best + more, dtype)
        assert total == found[tuple(cut)] == min(found.values())
    if best:
        assert least_squares(problem, places_of(problem), best - 1, dtype) is None


def test_numbers_are_exact_as_long_as_that_is_affordable():
    problem = problem_of([1.0] * 6, 3)
    few, many = [range(1)] * 4, [range(400)] * 4
    assert squares_dtype(problem, many, 10**8) is np.int64
    assert squares_dtype(problem, few, 10**9) is object
    assert squares_dtype(problem, many, 10**9) is np.float64
    # Room for every sum and one square more, which is what an int64 has to hold.
    edge = next(
        b for b in range(876_000_000, 877_000_000, 1000) if squares_dtype(problem, few, b) is object
    )
    top = infinity(np.int64, problem, edge - 1000)
    assert 3 * (edge - 1000) ** 2 < top
    assert top + (edge - 1000) ** 2 < 2**63
    assert infinity(np.float64, problem, edge) == np.inf


def test_places_are_counted_and_written_out():
    assert as_array(range(2, 5)).tolist() == [2, 3, 4]
    assert pairs([range(1), range(3), np.asarray([4, 7]), range(8, 9)]) == 1 * 3 + 3 * 2 + 2 * 1


def test_choices_are_followed_from_the_end():
    places = [range(1), np.asarray([1, 3]), range(4, 6), np.asarray([9])]
    choices = [np.asarray([0, 0]), np.asarray([1, 0]), np.asarray([1])]
    assert follow(places, choices) == [0, 1, 5, 9]


@pytest.mark.parametrize("empty", [1, 2])
def test_a_boundary_without_a_place_allows_no_cut(empty):
    problem = problem_of([1.0] * 6, 3)
    places = places_of(problem)
    places[empty] = range(0)
    assert least_bottleneck(problem, places, problem.forever) is None
    assert least_squares(problem, places, problem.forever) is None
