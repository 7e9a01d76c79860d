"""All boundaries that can be reached, against a walk over every pair of them."""

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.search import cover
from pipemesh.partition.search.cover import alive, cover_bottleneck
from pipemesh.partition.search.dense import as_array, least_bottleneck
from tests.partition.search.problems import SEEDS, any_problem, places_of

# Longer than what can be cut in all ways: intervals of several powers of two.
problems = st.builds(any_problem, seed=SEEDS, most=st.just(24))


def places_through(problem, bottleneck):
    """For each boundary the places that can be reached from the first and reach the last."""
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
@given(problems, st.integers(-3, 12))
def test_a_place_is_alive_if_and_only_if_an_allowed_cut_runs_through_it(problem, more):
    places = places_of(problem)
    if places is None:
        return
    bottleneck = (least_bottleneck(problem, places, problem.forever) or 9) + more
    kept = alive(problem, places, bottleneck)
    expected = places_through(problem, bottleneck)
    assert (kept is None) == (not all(expected))
    if kept is not None:
        assert [as_array(column).tolist() for column in kept] == expected


@settings(max_examples=80)
@given(problems, st.sampled_from([-1, 10, 2_000_000]))
def test_the_least_bottleneck_and_all_places_with_and_without_the_dense_program(problem, dense):
    if problem.size < problem.num_stages:
        return
    with mock.patch.object(cover, "DENSE_PAIRS", dense):
        found = cover_bottleneck(problem)
    if found is None:
        assert not all(places_through(problem, problem.forever))
        return
    bottleneck, kept = found
    assert [as_array(column).tolist() for column in kept] == places_through(problem, bottleneck)
    assert not all(places_through(problem, bottleneck - 1))
    # What is certainly too little is.
    assert cover._least_possible(problem) <= bottleneck


@settings(max_examples=120)
@given(problems, st.data())
def test_tables_of_intervals_say_which_begin_serves_which_end(problem, data):
    stage = data.draw(st.integers(0, problem.num_stages - 1))
    random = np.random.default_rng(data.draw(SEEDS))
    begin, end = (np.flatnonzero(random.random(problem.size + 1) < 0.8) for _ in range(2))
    if not begin.size or not end.size:
        return
    times = problem.stage_times(stage, begin[:, None], end[None, :])
    bottleneck = int(random.integers(times.max() + 1))
    good = problem.allowed(stage, begin, end) & (times <= bottleneck)
    interval = cover._Interval(problem, stage, begin, end, bottleneck)
    assert interval.served().tolist() == good.any(axis=1).tolist()
    if interval.some.any():
        assert interval.reached().tolist() == good.any(axis=0).tolist()
