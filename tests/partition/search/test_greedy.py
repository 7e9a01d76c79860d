"""Longest stages, against all cuts one after the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.search.greedy import UNDECIDED, Greedy, greedy_bottleneck, singles_fit
from tests.partition.search.problems import (
    cuts_of,
    monotone_problems,
    optimum,
    problem_of,
    time_of,
)


@settings(max_examples=200)
@given(monotone_problems)
def test_singles_fit_where_every_layer_is_an_allowed_stage_on_every_device(problem):
    alone = singles_fit(problem)
    times = [
        time_of(problem, stage, place, place + 1)
        for stage in range(problem.num_stages)
        for place in range(problem.size)
    ]
    if problem.max_layers is not None and None in times:
        return  # Pieces that same_stage keeps together may have too many layers.
    assert alone == (None if None in times else max(times))


@settings(max_examples=200)
@given(monotone_problems, st.integers(0, 40))
def test_no_cut_ends_its_stages_beyond_the_longest_ones_or_before_those_from_the_back(
    problem, bottleneck
):
    alone = singles_fit(problem)
    if alone is None or problem.size < problem.num_stages:
        return
    bottleneck += alone
    greedy = Greedy(problem)
    ends, following = greedy.forward(bottleneck)
    places = list(zip(*(cut for cut, _ in cuts_of(problem, bottleneck)), strict=True))
    if ends is None:
        assert not places
    else:
        assert ends == [max(column) for column in places]
        assert greedy.backward(bottleneck) == [min(column) for column in places]
    assert following > bottleneck or following == problem.forever
    for same in (bottleneck + 1, following - 1):
        if same < following:
            assert greedy.forward(same)[0] == ends


@settings(max_examples=200)
@given(monotone_problems)
def test_the_least_bottleneck_with_all_places_or_no_proof(problem):
    if singles_fit(problem) is None or problem.size < problem.num_stages:
        return
    found, best = greedy_bottleneck(problem), optimum(problem)
    if found is UNDECIDED:
        assert len(set(problem.kind_of_stage)) > 1
        assert best is not None and best <= singles_fit(problem)
        return
    if best is None:
        assert found is None
        return
    bottleneck, places = found
    assert bottleneck == best
    for cut, _ in cuts_of(problem, best):
        assert all(place in kept for place, kept in zip(cut, places, strict=True))


def test_a_slow_device_behind_a_long_stage_proves_nothing():
    # Longest stages first leave the slow third device with the layer of 5, which costs it 5.
    problem = problem_of([0.0, 0, 0, 2, 5, 0], 4, speeds=[1, 1, 1, 3])
    assert greedy_bottleneck(problem) is UNDECIDED
    assert optimum(problem) * problem.times.unit == 2
