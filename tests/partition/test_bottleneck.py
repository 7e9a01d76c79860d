"""The searches for the least bottleneck, against all cuts one after the other."""

import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.bottleneck import (
    UNDECIDED,
    alive,
    dense_bottleneck,
    earliest_places,
    greedy_bottleneck,
    least_possible,
    longest_stages,
    reachable_bottleneck,
    singles_fit,
)
from pipemesh.partition.problem import as_array
from tests.partition.problems import (
    SEEDS,
    any_problem,
    cuts_of,
    monotone_problems,
    optimum,
    places_of,
    problem_of,
    problems,
    time_of,
)

# Too long to try all cuts: intervals of several powers of two.
long_problems = st.builds(any_problem, seed=SEEDS, most=st.just(24))


@settings(max_examples=200)
@given(monotone_problems)
def test_singles_fit_if_each_layer_alone_is_allowed_everywhere(problem):
    single = singles_fit(problem)
    times = [
        time_of(problem, stage, place, place + 1)
        for stage in range(problem.num_stages)
        for place in range(problem.size)
    ]
    if problem.max_layers is not None and None in times:
        return  # Pieces that same_stage keeps together may have too many layers.
    assert single == (None if None in times else max(times))


@settings(max_examples=200)
@given(monotone_problems, st.integers(0, 40))
def test_longest_stages_bound_the_places_of_all_cuts(problem, bottleneck):
    single = singles_fit(problem)
    if single is None or problem.size < problem.num_stages:
        return
    bottleneck += single
    ends, following = longest_stages(problem, bottleneck)
    places = list(zip(*(cut for cut, _ in cuts_of(problem, bottleneck)), strict=True))
    if ends is None:
        assert not places
    else:
        assert ends == [max(column) for column in places]
        begins, least = earliest_places(problem, bottleneck), [min(column) for column in places]
        assert all(map(operator.le, begins, least))
        if not (problem.memory or problem.max_layers or problem.barriers or problem.pinned):
            assert begins == least
    assert following > bottleneck or following == problem.forever
    for same in (bottleneck + 1, following - 1):
        if same < following:
            assert longest_stages(problem, same)[0] == ends


@settings(max_examples=200)
@given(monotone_problems)
def test_greedy_finds_the_least_bottleneck_or_proves_nothing(problem):
    if singles_fit(problem) is None or problem.size < problem.num_stages:
        return
    result, best = greedy_bottleneck(problem), optimum(problem)
    if result is UNDECIDED:
        assert len(set(problem.kind_of_stage)) > 1
        assert best is not None and best <= singles_fit(problem)
        return
    if best is None:
        assert result is None
        return
    bottleneck, places = result
    assert bottleneck == best
    for cut, _ in cuts_of(problem, best):
        assert all(place in kept for place, kept in zip(cut, places, strict=True))


@given(problems)
def test_dense_bottleneck_is_the_least(problem):
    places, best = places_of(problem), optimum(problem)
    if best is None:
        assert places is None or dense_bottleneck(problem, places, problem.forever) is None
        return
    assert dense_bottleneck(problem, places, problem.forever) == best
    assert dense_bottleneck(problem, places, best + 1) == best
    assert dense_bottleneck(problem, places, best) is None


@pytest.mark.parametrize("empty", [1, 2])
def test_a_boundary_without_a_place_allows_no_cut(empty):
    problem = problem_of([1.0] * 6, 3)
    places = places_of(problem)
    places[empty] = range(0)
    assert dense_bottleneck(problem, places, problem.forever) is None


def places_through(problem, bottleneck):
    """Returns for each boundary the places on a way from the first to the last."""
    every = np.arange(problem.size + 1)
    good = []
    for stage in range(problem.num_stages):
        times = problem.stage_times(stage, every[:, None], every[None, :])
        good.append(problem.allowed(stage, every, every) & (times <= bottleneck))
    pins = dict(problem.pinned)
    pinned = [every == pins.get(boundary, every) for boundary in range(problem.num_stages + 1)]
    front, back = [every == 0], [every == problem.size]
    for stage, pairs in enumerate(good):
        front.append((front[-1][:, None] & pairs).any(axis=0) & pinned[stage + 1])
    for stage, pairs in reversed(list(enumerate(good))):
        back.append((back[-1][None, :] & pairs).any(axis=1) & pinned[stage])
    both = zip(front, reversed(back), strict=True)
    return [np.flatnonzero(a & b).tolist() for a, b in both]


@settings(max_examples=120)
@given(long_problems, st.integers(-3, 12))
def test_a_place_is_alive_if_an_allowed_cut_runs_through_it(problem, more):
    places = places_of(problem)
    if places is None:
        return
    bottleneck = (dense_bottleneck(problem, places, problem.forever) or 9) + more
    kept = alive(problem, places, bottleneck)
    expected = places_through(problem, bottleneck)
    assert (kept is None) == (not all(expected))
    if kept is not None:
        assert [as_array(column).tolist() for column in kept] == expected


@settings(max_examples=120)
@given(long_problems)
def test_the_least_bottleneck_and_all_its_places(problem):
    places = places_of(problem)
    if places is None:
        return
    result = reachable_bottleneck(problem, places)
    if result is None:
        assert not all(places_through(problem, problem.forever))
        return
    bottleneck, kept = result
    assert [as_array(column).tolist() for column in kept] == places_through(problem, bottleneck)
    assert not all(places_through(problem, bottleneck - 1))
    assert least_possible(problem) <= bottleneck
