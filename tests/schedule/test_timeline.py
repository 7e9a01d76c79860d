"""Bubbles, memory over time, sums of gradients and the critical path."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.partition import LayerCost, partition
from pipemesh.report import to_html, to_svg, to_terminal, to_trace
from pipemesh.schedule import (
    Costs,
    Schedule,
    gpipe,
    one_f_one_b,
    recompute,
    seq_one_f_one_b,
    simulate,
    validate,
)
from tests.schedule.random_schedules import costs_for, schedules


@given(schedules, st.integers(0, 3))
def test_the_critical_path_explains_the_makespan(schedule, transfer):
    timeline = simulate(schedule, Costs(2, 5, 2, 3, transfer))
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for one, two in itertools.pairwise(path):
        gap = two.start - one.end
        assert gap == (0 if one.device == two.device else transfer)


@given(st.data(), schedules)
def test_peaks_are_those_of_a_count_over_time(data, schedule):
    # Where an action takes no time, what it holds is a peak of no duration.
    timeline = simulate(schedule, data.draw(costs_for(schedule)))
    for device in range(schedule.num_devices):
        curve = timeline.activations(device)
        assert curve[-1][1] == 0 and curve == tuple(sorted(curve, key=lambda point: point[0]))
        assert max(held for _, held in curve) == timeline.peak_activations[device]
    assert sum(timeline.in_flight) >= max(timeline.peak_activations)


def test_a_device_without_actions_is_idle_all_the_time():
    timeline = simulate(Schedule.from_text("0: 0F0 0B0\n1:\n"))
    assert timeline.bubble == (0, 3)
    assert timeline.own_span_bubble == (0, 0)
    assert timeline.peak_activations == (1, 0)


@given(st.data(), schedules)
def test_sums_of_gradients_follow_their_stage_one_by_one_on_a_link(data, schedule):
    costs = data.draw(costs_for(schedule))
    plain = simulate(schedule, costs)
    some = st.lists(st.integers(0, 5), min_size=schedule.num_stages, max_size=schedule.num_stages)
    seconds = data.draw(some)
    timeline = simulate(schedule, dataclasses.replace(costs, gradient_sum=seconds))
    assert (timeline.starts, timeline.ends) == (plain.starts, plain.ends)
    summed = [] if schedule.is_forward_only else [s for s, n in enumerate(seconds) if n]
    assert sorted(each.stage for each in timeline.sums) == summed
    free = [0.0] * schedule.num_devices
    for each in timeline.sums:
        assert each.device == schedule.stage_devices[each.stage]
        assert each.start == max(timeline.stage_ends[each.stage], free[each.device])
        free[each.device] = each.end
    assert timeline.end == max([timeline.makespan, *free])


@given(st.data(), schedules)
def test_fetches_begin_when_a_device_is_free(data, schedule):
    """A device with one stage fetches at time 0; the last action of a path waits for each."""
    costs = data.draw(costs_for(schedule))
    some = st.lists(st.integers(1, 5), min_size=schedule.num_stages, max_size=schedule.num_stages)
    fetch, total = data.draw(some), data.draw(some)
    costs = dataclasses.replace(costs, all_gather=fetch, gradient_sum=total)
    timeline = simulate(schedule, costs)
    spans, fetches = [*timeline.spans()], [*timeline.fetches]
    for device in range(schedule.num_devices):
        is_alone = schedule.stage_devices.count(device) == 1
        before = None
        for span in [s for s in spans if s.device == device]:
            goes_on = before and span.action.kind in "BI" and before.action == span.action.also("R")
            if not (span.action.kind == "W" or goes_on or (is_alone and before)):
                each = fetches.pop(0)
                start = before.end if before else 0
                assert (each.device, each.stage) == (device, span.action.stage)
                assert (each.start, each.end) == (start, start + fetch[span.action.stage])
                assert span.start >= each.end
            before = span
    assert not fetches
    for device in range(schedule.num_devices):
        cells = sorted((s.start, s.end) for s in timeline.link_spans if s.device == device)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(cells))
    assert all(each.start >= timeline.stage_ends[each.stage] for each in timeline.sums)
    path = timeline.critical_path
    assert path[-1].end == timeline.makespan


def test_a_fetch_hides_where_its_device_waits():
    cases = [
        # The last of four devices waits for three forwards, the first for nothing.
        (one_f_one_b(4, 8), [0, 1, 2, 3], 33),
        (one_f_one_b(4, 8), [1, 1, 1, 1], 34),
        (one_f_one_b(4, 8).only_forward(), [1, 1, 1, 1], 12),
    ]
    for schedule, fetch, makespan in cases:
        assert simulate(schedule, Costs(1, 2, all_gather=fetch)).makespan == makespan


def test_free_actions_have_no_bubble():
    timeline = simulate(gpipe(2, 2), Costs(0, 0))
    assert timeline.makespan == timeline.bubble_ratio == timeline.critical_path[0].start == 0


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
    assert simulate(schedule).for_partition()["at_once"] == (0, Fraction(6, 4))
    plan = partition([LayerCost(1.0)] * 4, 2, remat="except_last", schedule=schedule)
    assert plan.stage_costs == (8.0, 2 * (3 + 0.75))


def test_memory_with_recomputation_by_hand():
    schedule = validate(Schedule.from_text("0F0 0F1 0R1 0B1 0R0 0B0"))
    timeline = simulate(schedule, Costs(forward=1, backward=2, recompute=0.5))
    assert timeline.ends == ((1, 2, 2.5, 4.5, 5, 7),)
    assert timeline.activations(0) == ((0, 1), (1, 1), (2, 1), (4.5, 1), (7, 0))
    assert timeline.peak_activations == (1,) == timeline.in_flight
    assert timeline.peak_inputs == (2,)


@pytest.mark.parametrize("schedule", [seq_one_f_one_b(2, 2, 2), recompute(gpipe(2, 3))])
def test_pictures_show_slices_and_recomputations(schedule):
    timeline = simulate(schedule)
    sliced = schedule.num_slices > 1
    assert ("0F0.1" if sliced else "0R1") in to_terminal(timeline)
    for picture in (to_svg(timeline), to_html(timeline)):
        assert ("microbatch 0, slice 1;" if sliced else "recomputation of stage 0") in picture
    assert ('"slice": 1' if sliced else "recomputation") in to_trace(timeline)
