"""The searches for the least bottleneck, against all cuts one after the other."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.bottleneck import (
    UNDECIDED,
    dense_bottleneck,
    greedy_bottleneck,
    least_possible,
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
    problems,
)

# Too long to try all cuts: intervals of several powers of two.
long_problems = st.builds(any_problem, seed=SEEDS, most=st.just(24))


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
