"""The search: never worse than what is published, within the memory, and deterministic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    list_schedule,
    lower_bound,
    simulate,
    validate,
)
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.placement import loop, vee

cost = st.integers(1, 6)


@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2))
def test_never_worse_than_a_builder_in_its_memory(data, num_devices, share, factor):
    num_microbatches = 2 * factor * num_devices
    num_stages = num_devices * share
    per_stage = st.lists(cost, min_size=num_stages, max_size=num_stages)
    costs = Costs(
        data.draw(per_stage),
        input_grad=data.draw(cost),
        weight_grad=data.draw(per_stage),
        transfer=data.draw(st.integers(0, 2)),
    )
    names = [
        name
        for name, builder in BUILDERS.items()
        if builder.trains and (builder.takes_virtual_stages or builder.virtual_stages == share)
    ]
    rival = simulate(
        build(data.draw(st.sampled_from(names)), num_devices, num_microbatches, share), costs
    )
    found = list_schedule(
        costs, num_devices, num_microbatches, rival.peak_activations, share, effort=20
    )
    timeline = simulate(validate(found), costs)
    assert timeline.makespan <= rival.makespan + 1e-9
    pairs = zip(timeline.peak_activations, rival.peak_activations, strict=True)
    assert all(mine <= theirs for mine, theirs in pairs)


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(0, 9))
def test_any_limit_from_one_microbatch_up_can_be_kept(num_devices, num_microbatches, share, more):
    limit = share + more
    found = list_schedule(
        Costs(2, input_grad=1, weight_grad=1), num_devices, num_microbatches, limit, share, effort=5
    )
    assert max(simulate(validate(found)).peak_activations) <= limit


def test_it_finds_the_optimum_for_equal_costs():
    # No step is shorter than the last device's start and its work.
    assert simulate(list_schedule(Costs(), 4, 8)).makespan == 27
    assert max(simulate(list_schedule(Costs(), 4, 8)).peak_activations) == 4
    assert simulate(list_schedule(Costs(), 4, 8, 8, 2)).makespan == 51


@pytest.mark.parametrize(
    ("share", "stages", "held", "makespan"),
    [
        (1, loop(8), 8, 103),
        (2, loop(8, 2), 8, 99.5),
        (2, vee(8), 8, 99.5),
        (2, loop(8, 2), 7, 100.5),
        (2, vee(8), 7, 100.5),
        (2, vee(8), 6, 101.5),
    ],
)
def test_the_bound_proves_it_optimal_for_8_devices(share, stages, held, makespan):
    costs, limit = Costs().refined(share), held * share
    found = list_schedule(costs, 8, 32, limit, stage_devices=stages)
    assert simulate(found, costs).makespan == makespan
    assert makespan <= 1.01 * lower_bound(costs, stages, 32, [limit] * 8)


@pytest.mark.parametrize(("held", "makespan", "above"), [(5, 104.5, 0.02), (4, 108.5, 0.049)])
def test_where_memory_is_short_it_is_near(held, makespan, above):
    costs = Costs().refined(2)
    timeline = simulate(list_schedule(costs, 8, 32, 2 * held, stage_devices=vee(8)), costs)
    assert timeline.makespan == makespan
    assert timeline.above_bound < above
    assert max(timeline.peak_activations) <= 2 * held


def test_4_devices_holding_three_microbatches():
    """It found 28 before, where a V takes 26.5."""
    found = list_schedule(Costs().refined(2), 4, 8, memory_limit=6, num_virtual_stages=2)
    assert simulate(found, Costs().refined(2)).makespan == 26.5


def test_it_beats_every_published_schedule_where_stages_are_unequal():
    costs = Costs(
        [1, 2, 1, 1, 3, 1, 1, 1],
        input_grad=1.5,
        weight_grad=[1, 1, 2, 1, 1, 1, 1, 1],
        transfer=0.25,
    )
    published = min(
        simulate(build(name, 4, 8, 2), costs).makespan
        for name, builder in BUILDERS.items()
        if builder.virtual_stages == 2
    )
    assert simulate(list_schedule(costs, 4, 8), costs).makespan < published


def test_it_is_deterministic():
    costs = Costs([1, 2, 3], transfer=0.5)
    assert list_schedule(costs, 3, 7, 3) == list_schedule(costs, 3, 7, 3)


def test_stages_follow_from_costs_or_placement():
    assert list_schedule(Costs([1] * 6), 3, 4).num_stages == 6
    found = list_schedule(Costs(), 2, 4, stage_devices=[0, 0, 1])
    assert found.stage_devices == (0, 0, 1)
    assert simulate(found).makespan == 2 * 4 * 3  # Device 0 is never idle.
    assert list_schedule(Costs(), 2, 4, num_virtual_stages=3).num_stages == 6


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Costs(), 0, 1), {}, "num_devices is 0"),
        ((Costs(), 1, 0), {}, "num_microbatches is 0"),
        ((Costs([1, 2, 3]), 2, 4), {}, "3 stages, which is no multiple of 2 devices"),
        ((Costs([1, 2]), 2, 4), {"num_virtual_stages": 2}, "has 2 values, .* 4 stages"),
        ((Costs(), 2, 4, 0), {}, "memory_limit of device 0 is 0, .* at least 1"),
        ((Costs(), 2, 4, [2, 1]), {"num_virtual_stages": 2}, "device 1 is 1, .* at least 2"),
        ((Costs(), 2, 4, [1, 2, 3]), {}, "memory_limit has 3 values, but there are 2 devices"),
        ((Costs(), 2, 4, 1.5), {}, "memory_limit is 1.5; give an integer"),
        ((Costs(), 2, 4), {"stage_devices": [0, 0]}, "every device from 0 to 1"),
        ((Costs(), 2, 4), {"stage_devices": [0, 1, 2]}, "every device from 0 to 1"),
        ((Costs(), 2, 4), {"num_virtual_stages": 0}, "num_virtual_stages is 0"),
    ],
)
def test_bad_input_is_an_error(arguments, options, message):
    with pytest.raises(ScheduleError, match=message):
        list_schedule(*arguments, **options)


def test_a_large_search_ends_in_time():
    found = list_schedule(Costs(1, input_grad=1.2, weight_grad=0.8, transfer=0.1), 16, 64)
    assert len(validate(found).rows) == 16
