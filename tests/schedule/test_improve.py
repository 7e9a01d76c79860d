"""Small changes along the critical path."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    Schedule,
    forward_only,
    gpipe,
    one_f_one_b,
    recompute,
    seq_one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.improve import improve


def test_small_changes_shorten_a_schedule_within_its_memory():
    costs = Costs([1, 1, 1, 2], transfer=0.5)
    before = simulate(one_f_one_b(4, 8), costs)
    after = simulate(improve(one_f_one_b(4, 8), costs, (4, 3, 2, 1), max_trials=200), costs)
    assert after.makespan < before.makespan
    assert after.peak_activations == (4, 3, 2, 1)
    untouched = improve(one_f_one_b(4, 8), costs, (4, 3, 2, 1), max_trials=0)
    assert untouched == one_f_one_b(4, 8)


def test_an_optimal_schedule_stays_as_it_is():
    for schedule in (zb_h1(3, 6), zb_h2(3, 6), zb_v(3, 6)):
        assert (
            simulate(improve(schedule, Costs(), (9, 9, 9), 300)).makespan
            == simulate(schedule).makespan
        )


def test_a_weight_gradient_moves_behind_the_last_forward():
    before = Schedule.from_text("0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1I0 1W0 1F1 1I1 1W1")
    assert simulate(before).makespan == 8
    # No step is shorter than the start of the last device and its work.
    assert simulate(improve(before, Costs(), (2, 2), 50)).makespan == 1 + 6


def test_a_change_that_needs_more_memory_is_not_made():
    schedule = Schedule.from_text("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0 1F1 1B1")
    assert simulate(schedule).makespan == 12
    free = improve(schedule, Costs(), (2, 2), 200)
    assert simulate(free).makespan < 12 and simulate(free).peak_activations[0] == 2
    assert simulate(improve(schedule, Costs(), (1, 1), 200)).peak_activations == (1, 1)


@settings(max_examples=25)
@given(st.sampled_from(sorted(set(BUILDERS) - {"forward_only", "decode"})), st.data())
def test_more_trials_never_make_a_schedule_longer(name, data):
    schedule = build(name, 2, 4)
    durations = st.lists(
        st.integers(1, 5), min_size=schedule.num_stages, max_size=schedule.num_stages
    )
    costs = Costs(data.draw(durations), None, data.draw(durations), data.draw(durations), 0.5)
    limits = simulate(schedule, costs).peak_activations
    spans = []
    for trials in (0, 1, 3, 10, 30):
        found = simulate(validate(improve(schedule, costs, limits, trials)), costs)
        spans.append(found.makespan)
        held = zip(found.peak_activations, limits, strict=True)
        assert all(peak <= limit for peak, limit in held)
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == simulate(schedule, costs).makespan


cost = st.integers(1, 5)


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from([gpipe, one_f_one_b, zb_h1, zb_v, seq_one_f_one_b]),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_only_recomputations_are_added(data, builder, num_devices, factor):
    schedule = builder(num_devices, 2 * num_devices * factor)
    stages = data.draw(st.sets(st.integers(0, schedule.num_stages - 1)))
    per_stage = st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(forward=data.draw(per_stage), backward=data.draw(per_stage), transfer=1)
    found = validate(recompute(schedule, stages, costs))
    without = tuple(tuple(a for a in row if a.kind != "R") for row in found.rows)
    assert without == schedule.rows
    assert {stage for stage, _ in found.recomputed()} <= stages
    before, after = simulate(schedule, costs), simulate(found, costs)
    pairs = zip(after.peak_activations, before.peak_activations, strict=True)
    assert all(less <= more for less, more in pairs)
    assert before.makespan <= after.makespan
    assert after.lower_bound <= after.makespan


def test_memory_with_recomputation_by_hand():
    schedule = validate(Schedule.from_text("0F0 0F1 0R1 0B1 0R0 0B0"))
    timeline = simulate(schedule, Costs(forward=1, backward=2, recompute=0.5))
    assert timeline.ends == ((1, 2, 2.5, 4.5, 5, 7),)
    assert timeline.activations(0) == ((0, 1), (1, 1), (2, 1), (4.5, 1), (7, 0))
    assert timeline.peak_activations == (1,) == timeline.in_flight
    assert timeline.peak_inputs == (2,)


def test_a_recomputation_costs_a_forward_by_default():
    assert Costs(forward=[1, 2]).recompute == (1, 2)
    assert Costs(forward=4, recompute=1).refined(2).recompute == 0.5
    assert Costs(forward=4).refined(2, 2).recompute == 1


def test_recomputations_fill_waiting_time():
    """The last stage takes twice as long, so that all others recompute for nothing."""
    costs = Costs(forward=[1] * 7 + [2], backward=[2] * 7 + [4])
    plain = simulate(one_f_one_b(8, 32), costs)
    timeline = simulate(recompute(one_f_one_b(8, 32), costs=costs), costs)
    assert timeline.makespan == plain.makespan == 213
    assert plain.peak_activations == (8, 7, 6, 5, 4, 3, 2, 1)
    assert timeline.peak_activations == (1,) * 8


def test_with_room_they_move_to_idle_time():
    """A device that may hold more recomputes before a forward that it waits for."""
    costs, schedule = Costs(forward=1, backward=2), one_f_one_b(8, 32)
    late = simulate(recompute(schedule, costs=costs), costs)
    early = simulate(recompute(schedule, costs=costs, memory_limits=[3] * 8), costs)
    assert early.makespan < late.makespan
    assert max(early.peak_activations) <= 3


def test_chosen_stages_alone():
    found = recompute(one_f_one_b(3, 4), {1})
    assert {stage for stage, _ in found.recomputed()} == {1}
    assert simulate(found).peak_activations == (3, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((forward_only(2, 2),), "no backward actions"),
        ((recompute(gpipe(2, 2)),), "has recomputations already"),
        ((gpipe(2, 2), {2}), "stages has 2, but stages are from 0 to 1"),
        ((gpipe(2, 2), None, None, [1]), "memory_limits has 1 values, but there are 2 devices"),
        ((gpipe(2, 2), {0}, None, [2, 1]), "device 1 holds 2 even with"),
    ],
)
def test_impossible_recomputations_are_errors(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        recompute(*arguments)
