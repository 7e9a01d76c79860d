"""From costs and options to integers: units, kinds of stages, boundaries."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.partition import LayerCost
from pipemesh.partition.build import EXACT_PAIRS, allowed_positions, build_memory, build_problem
from pipemesh.partition.costs import as_stack
from pipemesh.partition.options import Options

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


def test_times_are_those_of_the_layers_at_the_speed_and_share_of_each_stage():
    options = Options(
        4,
        speeds=(1.0, 0.5, 1.0, 2.0),
        remat="except_last",
        schedule="gpipe",
        num_microbatches=3,
        bandwidth=0.7,
        same_stage=((1, 2),),
    )
    problem = build_problem(as_stack(LAYERS), options)
    assert problem.positions.tolist() == [0, 1, 3, 4, 5, 6, 7]
    # Device 0 and 2 are alike.
    assert problem.kind_of_stage == (0, 1, 0, 2)
    unit = problem.times.unit
    for stage, speed in enumerate((1, Fraction(1, 2), 1, 2)):
        sums = problem.prefix(stage).tolist()
        for (a, b), (i, j) in zip(
            itertools.pairwise(sums), itertools.pairwise(problem.positions.tolist()), strict=True
        ):
            time = sum(Fraction(n, 10) * Fraction(5, 3) + Fraction(1, 5) + n for n in range(i, j))
            assert (b - a) * unit == time / speed
    crossing = [0, *(Fraction(3 * (p - 1), 10) / Fraction(7, 10) for p in (1, 3, 4, 5, 6)), 0]
    assert [units * unit for units in problem.times.transfers.tolist()] == crossing


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


def test_there_is_a_memory_model_where_costs_and_schedule_say_enough():
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
    num_layers = math.isqrt(EXACT_PAIRS) + more
    values = np.random.default_rng(0).random(num_layers) / 7
    # One stage can lie in the square of that many ways, as pairs are counted.
    assert build_problem(as_stack(values), Options(1)).times.rounded == bool(more)
