"""The most even cut: what prunes never loses it."""

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.search import squares as searched
from pipemesh.partition.search.squares import even_cut
from tests.partition.search.problems import (
    cuts_of,
    optimum,
    places_of,
    problem_of,
    problems,
    squares,
)


@settings(max_examples=100)
@given(problems, st.sampled_from([-1, 300_000]), st.sampled_from([1, 2, 16]))
def test_no_allowed_cut_is_more_even(problem, dense, corridor):
    best = optimum(problem)
    if best is None:
        return
    with mock.patch.multiple(searched, DENSE_PAIRS=dense, _CORRIDOR=corridor):
        cut = even_cut(problem, places_of(problem), best)
    found = {cut: squares(times) for cut, times in cuts_of(problem, best)}
    assert found[tuple(cut)] == min(found.values())


@settings(max_examples=100)
@given(problems, st.integers(0, 10))
def test_bounds_are_no_larger_than_the_best_and_prune_no_place_of_it(problem, more):
    best = optimum(problem)
    if not best:
        return
    bottleneck = best + more
    found = {cut: squares(times) for cut, times in cuts_of(problem, bottleneck)}
    least = min(found.values())
    bound = searched._Bound(problem, places_of(problem), bottleneck)
    assert not bound.proves(least + 1)
    # From any allowed cut as the upper bound: of it, and of all that are better, every place stays.
    for upper in sorted(set(found.values()))[:3]:
        kept = bound.prune(places_of(problem), float(upper))
        for cut, total in found.items():
            if total <= upper:
                assert all(place in column for place, column in zip(cut, kept, strict=True))


def test_where_the_bound_is_reached_it_is_a_proof():
    problem = problem_of([1.0] * 12, 4)
    bottleneck = optimum(problem)
    bound = searched._Bound(problem, places_of(problem), bottleneck)
    assert bound.proves(4 * bottleneck**2)
    assert bound.centers().tolist() == [0, 3, 6, 9, 12]
    kept = bound.prune(places_of(problem), float(4 * bottleneck**2))
    assert [list(column) for column in kept] == [[0], [3], [6], [9], [12]]


def test_a_large_layer_fills_a_stage_of_its_own():
    problem = problem_of([1.0] * 6 + [50] + [1.0] * 6, 5)
    bottleneck = optimum(problem)
    bound = searched._Bound(problem, places_of(problem), bottleneck)
    assert bound.centers().tolist() == [0, 3, 6, 7, 10, 13]
    assert bound.proves(bottleneck**2 + 4 * (bottleneck * 3 // 50) ** 2)
