"""Bubbles, memory over time and the critical path."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.partition import LayerCost, partition
from pipemesh.schedule import (
    Costs,
    Schedule,
    forward_only,
    gpipe,
    one_f_one_b,
    seq_one_f_one_b,
    simulate,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build


def test_the_two_bubbles_of_zb_v_differ():
    timeline = simulate(zb_v(4, 8))
    assert timeline.own_span_bubble == (0, 0, 0, 0)
    assert timeline.bubble == (3, 3, 3, 3)
    assert timeline.total_bubble == 12
    assert timeline.bubble_ratio == pytest.approx(12 / (4 * 51))


def test_curve_of_activations():
    timeline = simulate(one_f_one_b(2, 3), Costs(1, 2))
    assert timeline.activations(1) == (
        (1.0, 1), (4.0, 1), (7.0, 1), (10.0, 0)
    )  # fmt: skip
    assert simulate(forward_only(1, 2)).activations(0) == ((0.0, 1), (1.0, 1), (2.0, 0))


@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_the_critical_path_explains_the_makespan(name, num_devices, factor, transfer):
    schedule = build(name, num_devices, 2 * factor * num_devices)
    timeline = simulate(schedule, Costs(2, 5, 2, 3, transfer))
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for one, two in itertools.pairwise(path):
        gap = two.start - one.end
        assert gap == (0 if one.device == two.device else transfer)


def test_a_device_without_actions_is_idle_all_the_time():
    timeline = simulate(Schedule.from_text("0: 0F0 0B0\n1:\n"))
    assert timeline.bubble == (0, 3)
    assert timeline.own_span_bubble == (0, 0)
    assert timeline.peak_activations == (1, 0)


def test_free_actions_have_no_bubble():
    timeline = simulate(gpipe(2, 2), Costs(0, 0))
    assert timeline.makespan == 0
    assert timeline.bubble_ratio == 0
    assert timeline.critical_path[0].start == 0


def test_in_flight_counts_by_stage():
    assert simulate(gpipe(2, 3).only_forward()).in_flight == (1, 1)
    table = Schedule.from_text("0: 0F0 0F1 0B1 0B0\n1: 1F0 1F1 1B1 1B0")
    assert simulate(table).in_flight == (2, 2)
    assert simulate(one_f_one_b(2, 1)).for_partition()["at_once"] == (1, 1)


def test_slices_turn_one_by_one():
    """Of four slices of a microbatch only the last is followed by its own backward pass."""
    schedule = seq_one_f_one_b(2, 6, 4)
    assert schedule.turns_at_once() == {(1, 4 * m + 3) for m in range(6)}
    assert schedule.turns_at_once() == schedule.by_pieces().turns_at_once()
    facts = simulate(schedule).for_partition()
    assert facts["at_once"] == (0, Fraction(6, 4))
    plan = partition([LayerCost(1.0)] * 4, 2, remat="except_last", **facts)
    assert plan.stage_costs == (8.0, 2 * (3 + 0.75))
