"""The problem in integers, against layers and options in fractions."""

import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition import LayerCost
from pipemesh.partition.costs import as_stack
from pipemesh.partition.options import Options
from pipemesh.partition.problem import (
    FEW_PAIRS,
    ComputeTimes,
    allowed_positions,
    build_memory,
    build_problem,
)
from tests.partition.problems import (
    cuts_of,
    monotone_problems,
    problem_of,
    problems,
    stack_of,
    time_of,
)

SPEEDS = st.lists(st.sampled_from([1, 3, 0.5]), min_size=3, max_size=3)


@given(st.integers(0, 2**40), SPEEDS, st.sampled_from([None, 0.3, 2]), st.booleans(), st.booleans())
def test_stage_times_are_sums_over_layers_and_boundaries(seed, speeds, bandwidth, overlap, v):
    layers = stack_of(Random(seed), fewest=2)
    options = {"speeds": speeds, "remat": "full"}
    homes = (0, 1, 2)
    if v:
        homes = (0, 1, 1)
        options |= {"stage_devices": homes, "speeds": speeds[:2]}
    if bandwidth:
        options |= {"bandwidth": bandwidth, "overlap_transfers": overlap}
    problem = problem_of(layers, 3, **options)

    def crossing(boundary, place):
        """The time at the boundary in front of a stage."""
        if not bandwidth or boundary in (0, 3) or homes[boundary - 1] == homes[boundary]:
            return Fraction(0)
        return Fraction(layers[place - 1].boundary_bytes) / Fraction(str(bandwidth))

    for inner in itertools.combinations(range(1, len(layers)), 2):
        cut = (0, *inner, len(layers))
        for stage, (begin, end) in enumerate(itertools.pairwise(cut)):
            # All forward passes run twice.
            compute = sum(2 * layer.forward + layer.backward for layer in layers[begin:end])
            compute = Fraction(compute) / Fraction(speeds[homes[stage]])
            waits = crossing(stage, begin) + crossing(stage + 1, end)
            expected = max(compute, waits) if bandwidth and overlap else compute + waits
            assert time_of(problem, stage, begin, end) * problem.times.unit == expected


@settings(max_examples=60)
@given(problems)
def test_windows_follow_from_counts_and_pins(problem):
    first, last = problem.windows()
    pins = dict(problem.pinned)
    inner = itertools.combinations(range(1, problem.size), problem.num_stages - 1)
    cuts = [(0, *places, problem.size) for places in inner]
    cuts = [cut for cut in cuts if all(cut[b] == place for b, place in pins.items())]
    if cuts:
        columns = list(zip(*cuts, strict=True))
        assert first.tolist() == list(map(min, columns))
        assert last.tolist() == list(map(max, columns))
    else:
        assert (first > last).any()


@settings(max_examples=60)
@given(problems)
def test_ends_are_bounded_by_layers_walls_and_memory(problem):
    memory = problem.memory
    places = np.arange(problem.size)
    first = problem.first_end(places)
    for stage in range(problem.num_stages):
        last = problem.last_end(stage, places)
        for begin in range(problem.size):
            for end in range(begin + 1, problem.size + 1):
                layers = int(problem.positions[end] - problem.positions[begin])
                allowed = problem.min_layers <= layers
                allowed &= problem.max_layers is None or layers <= problem.max_layers
                allowed &= not any(begin < wall < end for wall in problem.barriers)
                if memory is not None:
                    allowed &= int(memory.units(stage, begin, end)) <= memory.limit
                assert (first[begin] <= end <= last[begin]) == allowed
                assert (time_of(problem, stage, begin, end) is not None) == allowed


@settings(max_examples=60)
@given(monotone_problems)
def test_in_monotone_problems_parts_of_stages_are_allowed(problem):
    for stage in range(problem.num_stages):
        for begin, end in itertools.combinations(range(problem.size + 1), 2):
            whole = time_of(problem, stage, begin, end)
            if whole is not None and end - begin > 1:
                parts = (
                    time_of(problem, stage, *part) for part in ((begin, end - 1), (begin + 1, end))
                )
                assert all(part is not None and part <= whole for part in parts)


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({"min_layers": 2}, {}),
        ({"bandwidth": 1}, {}),
        ({"remat": "full", "memory_limit": 100, "num_microbatches": 1}, {}),
        ({"memory_limit": 100, "num_microbatches": 1}, {"shared_bytes": 1}),
    ],
)
def test_options_that_favour_longer_stages_are_not_monotone(options, layer):
    layers = [LayerCost(1, activation_bytes=2, boundary_bytes=1, **layer)] * 4
    assert not problem_of(layers, 2, **options).monotone


@settings(max_examples=60)
@given(problems)
def test_nothing_takes_forever_and_exact_times_have_no_ties(problem):
    assert all(max(times) < problem.forever for _, times in cuts_of(problem))
    assert not problem.times.rounded
    assert problem.tied(7) == 7


@pytest.mark.parametrize("exact", [False, True])
def test_long_digits_are_exact_or_on_a_grid(exact):
    values = np.random.default_rng(0).random(300) / 7
    kinds = ((Fraction(1), Fraction(0)), (Fraction(3), Fraction(0)))
    times = ComputeTimes.build(as_stack(values), np.arange(301), kinds, None, exact)
    assert times.rounded != exact
    assert times.dtype is (object if exact else np.int64)
    sums = [Fraction(0), *itertools.accumulate(map(Fraction, values.tolist()))]
    for kind, (speed, _) in enumerate(kinds):
        for place, units in enumerate(times.prefix(kind).tolist()):
            error = abs(units * times.unit - sums[place] / speed)
            # Half a unit a layer, and the last bits of a division.
            most = Fraction(place, 2) + (0 if speed == 1 else units >> 45)
            assert error <= (0 if exact else times.unit * most)


def test_rounded_bottlenecks_tie():
    values = np.random.default_rng(0).random(3000) / 7
    problem = problem_of(values, 4)
    assert problem.times.rounded
    assert problem.tied(5) == 5 + 3000
    assert problem.tied(2**50) == 2**50 + 3000 + 2**5


GROUPS = st.lists(st.sets(st.integers(0, 9), min_size=2, max_size=3).map(sorted), max_size=3)


@given(st.integers(10, 12), GROUPS)
def test_a_boundary_is_allowed_where_it_cuts_no_group(layers, groups):
    allowed = allowed_positions(layers, groups).tolist()
    for place in range(layers + 1):
        assert (place in allowed) == (not any(g[0] < place <= g[-1] for g in groups))


LAYERS = [
    LayerCost(
        n / 10,
        backward=n + 0.2,
        parameter_bytes=8.0,
        activation_bytes=4.0,
        boundary_bytes=3 * n / 10,
    )
    for n in range(7)
]


def test_layers_at_which_stages_begin_become_boundaries():
    options = Options(3, same_stage=((1, 3),), fixed=(4, 6), num_virtual_stages=3)
    problem = build_problem(as_stack([1.0] * 7), options)
    assert problem.positions.tolist() == [0, 1, 4, 5, 6, 7]
    assert problem.barriers == (2, 4)
    options = Options(3, same_stage=((1, 3),), pinned=((1, 4), (2, 5)), min_layers=2, max_layers=4)
    problem = build_problem(as_stack([1.0] * 7), options)
    assert problem.pinned == ((1, 2), (2, 3))
    assert (problem.min_layers, problem.max_layers) == (2, 4)


def test_one_device_sends_nothing_to_itself():
    stack = as_stack(LAYERS)
    assert (
        build_problem(stack, Options(2, bandwidth=1.0, num_virtual_stages=2)).times.transfers
        is None
    )
    assert build_problem(stack, Options(2, bandwidth=1.0)).times.transfers is not None


def test_a_memory_model_needs_bytes_and_microbatches():
    stack, places = as_stack(LAYERS), np.arange(8)
    counted = Options(2, num_microbatches=3)
    assert build_memory(as_stack([1.0] * 7), counted, places, exact=True) is None
    assert build_memory(stack, Options(2), places, exact=True) is None
    model = build_memory(stack, counted, places, exact=True)
    # 7 layers with twice as many bytes of optimizer state beside parameters, two in flight.
    assert int(model.units(0, 0, 7)) * model.unit == 7 * (3 * 8 + 2 * 4)
    # But a problem has one only where it is limited.
    assert build_problem(stack, counted).memory is None
    limited = build_problem(stack, Options(2, num_microbatches=3, memory_limit=99.5)).memory
    assert limited.limit * limited.unit <= 99.5 < (limited.limit + 1) * limited.unit


@pytest.mark.parametrize("more", [0, 1])
def test_small_problems_are_exact_and_large_ones_lie_on_a_grid(more):
    num_layers = math.isqrt(FEW_PAIRS) + more
    values = np.random.default_rng(0).random(num_layers) / 7
    # One stage can lie in the square of that many ways, as pairs are counted.
    assert build_problem(as_stack(values), Options(1)).times.rounded == bool(more)
