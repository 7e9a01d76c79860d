"""The search: never worse than what is published, within the memory, and deterministic."""

import importlib
import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    Schedule,
    forward_only,
    gpipe,
    list_schedule,
    lower_bound,
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
from pipemesh.schedule.list_schedule import Greedy, Policy, improved, limits_of, placements_of
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.schedule import loop, vee

cost = st.integers(1, 6)


@settings(max_examples=8)
@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))
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
        for name in BUILDERS
        if NAMES[name].trains and (NAMES[name].is_open or NAMES[name].stages_a_device == share)
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


@settings(max_examples=8)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(0, 9))
def test_any_limit_from_one_microbatch_up_can_be_kept(num_devices, num_microbatches, share, more):
    limit = share + more
    found = list_schedule(
        Costs(2, input_grad=1, weight_grad=1), num_devices, num_microbatches, limit, share, effort=5
    )
    assert max(simulate(validate(found)).peak_activations) <= limit


def test_it_finds_the_optimum_for_equal_costs():
    # No step is shorter than the last device's start and its work.
    timeline = simulate(list_schedule(Costs(), 4, 8))
    assert (timeline.makespan, max(timeline.peak_activations)) == (27, 4)


@pytest.mark.parametrize(
    ("share", "stages", "held", "makespan"),
    [
        (1, loop(8), 8, 103),
        *(
            pytest.param(2, stages, held, makespan, marks=pytest.mark.exhaustive)
            for stages in (loop(8, 2), vee(8))
            for held, makespan in ((8, 99.5), (7, 100.5))
        ),
        pytest.param(2, vee(8), 6, 101.5, marks=pytest.mark.exhaustive),
    ],
)
def test_the_bound_proves_it_optimal_for_8_devices(share, stages, held, makespan):
    costs, limit = Costs().refined(share), held * share
    found = list_schedule(costs, 8, 32, limit, stage_devices=stages)
    assert simulate(found, costs).makespan == makespan
    assert makespan <= 1.01 * lower_bound(costs, stages, 32, [limit] * 8)


@pytest.mark.parametrize(
    ("held", "makespan", "above"),
    [pytest.param(5, 104.5, 0.02, marks=pytest.mark.exhaustive), (4, 108.5, 0.049)],
)
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


def test_it_looks_at_the_costs_of_unequal_stages():
    costs = Costs(
        [1, 2, 1, 1, 3, 1, 1, 1],
        input_grad=1.5,
        weight_grad=[1, 1, 2, 1, 1, 1, 1, 1],
        transfer=0.25,
    )
    assert simulate(list_schedule(costs, 4, 8), costs).makespan == 72


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
        ((Costs([1, 2, 3]), 2, 4), {}, "3 stages, which is not a multiple of 2 devices"),
        (
            (Costs([1, 2]), 2, 4),
            {"num_virtual_stages": 2},
            "cost forward has 2 values, .* 4 stages",
        ),
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


def test_a_large_search_tries_less(monkeypatch):
    """Of a table with as many actions as the budget: the fewest runs, no blocks, one change."""
    module = importlib.import_module("pipemesh.schedule.list_schedule")
    monkeypatch.setattr(module, "_BUDGET", 8 * 16 * 3)
    greedy = mock.Mock(wraps=module.Greedy)
    monkeypatch.setattr(module, "Greedy", greedy)
    monkeypatch.setattr(module, "even_blocks", None)
    costs = Costs(1, input_grad=1.2, weight_grad=0.8, transfer=0.1)
    assert len(validate(list_schedule(costs, 8, 16)).rows) == 8
    assert greedy.call_count == 8


def rows(homes, num_microbatches, policy, costs=None):
    found = Greedy((costs or Costs()).per_stage(len(homes)), homes, num_microbatches, policy).rows()
    return found and [" ".join(map(str, row)) for row in found]


@pytest.mark.parametrize(
    ("prefer", "cap", "row"),
    [
        ("F", 3, "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"),
        ("F", 2, "0F0 0F1 0I0 0I1 0W0 0F2 0I2 0W1 0W2"),
        ("I", 3, "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"),
        ("I", 1, "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"),
        ("alternate", 3, "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"),
    ],
)
def test_one_device_follows_its_rule_within_its_memory(prefer, cap, row):
    assert rows([0], 3, Policy(prefer, False, False, (cap,))) == [row]


def test_in_turn_is_neither_of_both():
    # When 1I0 arrives, 0F2 is ready too, and what device 0 did last was a forward.
    costs = Costs([2, 1])
    turns = rows([0, 1], 4, Policy("alternate", False, False, (4, 4)), costs)
    assert turns[0].startswith("0F0 0F1 0I0 0F2 0I1")
    forward = rows([0, 1], 4, Policy("F", False, False, (4, 4)), costs)
    assert forward[0].startswith("0F0 0F1 0F2 0F3 0I0")


def test_of_two_stages_the_later_one_goes_first_if_it_shall():
    early = rows([0, 0], 2, Policy("F", False, False, (4,)))
    deep = rows([0, 0], 2, Policy("F", True, False, (4,)))
    assert early[0].startswith("0F0 0F1 1F0 1F1")
    assert deep[0].startswith("0F0 1F0 0F1 1F1")


def test_patient_devices_wait_for_arrivals_on_their_way():
    # 0I1 arrives while a weight gradient of 5 would run.
    costs = Costs([1, 0.5], input_grad=1, weight_grad=[5, 1])
    hasty = rows([0, 1], 2, Policy("I", False, False, (3, 3)), costs)
    patient = rows([0, 1], 2, Policy("I", False, True, (3, 3)), costs)
    assert hasty[0] == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert patient[0] == "0F0 0F1 0I0 0I1 0W0 0W1"


RULES = list(itertools.product(("F", "I", "alternate"), (False, True), (False, True)))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.sampled_from(RULES))
def test_one_place_a_stage_is_enough_to_get_through(data, num_devices, num_microbatches, rule):
    others = data.draw(st.lists(st.integers(0, num_devices - 1), max_size=3))
    homes = data.draw(st.permutations([*range(num_devices), *others]))
    more = data.draw(st.lists(st.integers(0, 4), min_size=num_devices, max_size=num_devices))
    cap = tuple(homes.count(device) + extra for device, extra in enumerate(more))
    durations = st.lists(st.integers(1, 4), min_size=len(homes), max_size=len(homes))
    costs = Costs(data.draw(durations), None, data.draw(durations), data.draw(durations), 0.5)
    found = Greedy(costs.per_stage(len(homes)), homes, num_microbatches, Policy(*rule, cap)).rows()
    schedule = validate(Schedule(found, homes, num_microbatches))
    held = zip(simulate(schedule, costs).peak_activations, cap, strict=True)
    assert all(peak <= most for peak, most in held)


def test_less_than_a_place_a_stage_gets_stuck():
    assert rows([0, 0], 2, Policy("I", False, False, (1,))) is None


def test_two_stages_a_device_lie_on_a_loop_or_on_a_v():
    assert placements_of(Costs(), 3, 2, None) == [loop(3, 2), vee(3)]
    assert placements_of(Costs([1] * 6), 3, None, None) == [loop(3, 2), vee(3)]
    assert placements_of(Costs(), 3, 3, None) == [loop(3, 3)]
    assert placements_of(Costs(), 3, None, None) == [loop(3)]
    assert placements_of(Costs(), 1, 2, None) == [(0, 0)]
    assert placements_of(Costs(), 2, 7, [0, 1, 1]) == [(0, 1, 1)]


def test_a_limit_is_one_number_or_one_a_device_or_none():
    assert limits_of(3, (0, 1), 2, 8) == (3, 3)
    assert limits_of([3, 1], (0, 1), 2, 8) == (3, 1)
    assert limits_of(None, (0, 1, 1), 2, 8) == (8, 16)
    with pytest.raises(ScheduleError, match="device 1 is 1, but it has 2 stages"):
        limits_of([2, 1], (0, 1, 1), 2, 8)


def test_small_changes_shorten_a_schedule_within_its_memory():
    costs = Costs([1, 1, 1, 2], transfer=0.5)
    before = simulate(one_f_one_b(4, 8), costs)
    after = improved(before, (4, 3, 2, 1), max_trials=200)
    assert after.makespan < before.makespan
    assert after.peak_activations == (4, 3, 2, 1)
    assert improved(before, (4, 3, 2, 1), max_trials=0) == before


def test_an_optimal_schedule_stays_as_it_is():
    for schedule in (zb_h1(3, 6), zb_h2(3, 6), zb_v(3, 6)):
        before = simulate(schedule)
        assert improved(before, (9, 9, 9), 300).makespan == before.makespan


def test_a_weight_gradient_moves_behind_the_last_forward():
    table = "0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1I0 1W0 1F1 1I1 1W1"
    before = simulate(Schedule.from_text(table))
    assert before.makespan == 8
    # No step is shorter than the start of the last device and its work.
    assert improved(before, (2, 2), 50).makespan == 1 + 6


def test_a_change_that_needs_more_memory_is_not_made():
    before = simulate(Schedule.from_text("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0 1F1 1B1"))
    assert before.makespan == 12
    free = improved(before, (2, 2), 200)
    assert free.makespan < 12 and free.peak_activations[0] == 2
    assert improved(before, (1, 1), 200).peak_activations == (1, 1)


@settings(max_examples=25)
@given(st.sampled_from(sorted(set(BUILDERS) - {"forward_only", "decode"})), st.data())
def test_more_trials_never_make_a_schedule_longer(name, data):
    schedule = build(name, 2, 4)
    durations = st.lists(
        st.integers(1, 5), min_size=schedule.num_stages, max_size=schedule.num_stages
    )
    costs = Costs(data.draw(durations), None, data.draw(durations), data.draw(durations), 0.5)
    before = simulate(schedule, costs)
    limits = before.peak_activations
    spans = []
    for trials in (0, 1, 3, 10, 30):
        found = improved(before, limits, trials)
        validate(found.schedule)
        spans.append(found.makespan)
        held = zip(found.peak_activations, limits, strict=True)
        assert all(peak <= limit for peak, limit in held)
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == before.makespan


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
