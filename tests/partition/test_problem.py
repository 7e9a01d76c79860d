"""The problem in integers, against layers and options in fractions."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings

from pipemesh.partition import LayerCost
from pipemesh.partition.costs import as_stack
from pipemesh.partition.options import Options
from pipemesh.partition.problem import (
    FEW_PAIRS,
    ComputeTimes,
    build_problem,
)
from tests.partition.problems import (
    cuts_of,
    problem_of,
    problems,
    time_of,
)


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


@pytest.mark.parametrize("more", [0, 1])
def test_small_problems_are_exact_and_large_ones_lie_on_a_grid(more):
    num_layers = math.isqrt(FEW_PAIRS) + more
    values = np.random.default_rng(0).random(num_layers) / 7
    # One stage can lie in the square of that many ways, as pairs are counted.
    assert build_problem(as_stack(values), Options(1)).times.rounded == bool(more)


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
