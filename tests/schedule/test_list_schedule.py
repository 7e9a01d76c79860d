"""The search: never worse than what is published, within the memory, and deterministic."""

import importlib
import itertools
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule import (
    Costs,
    Schedule,
    gpipe,
    list_schedule,
    lower_bound,
    one_f_one_b,
    recompute,
    seq_one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.list_schedule import Greedy, Policy, improved
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.schedule import loop, vee

cost = st.integers(1, 6)
SLOW_W = Costs([1, 0.5], input_grad=1, weight_grad=[5, 1])


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
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(0, 9))
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


LONG = pytest.mark.exhaustive
UNEVEN = Costs(
    [1, 2, 1, 1, 3, 1, 1, 1],
    input_grad=1.5,
    weight_grad=[1, 1, 2, 1, 1, 1, 1, 1],
    transfer=0.25,
)


@pytest.mark.parametrize(
    ("costs", "num_microbatches", "limit", "stages", "makespan", "above"),
    [
        # The bound proves it optimal, or nearly.
        (Costs(), 32, 8, loop(8), 103, 0.01),
        *(
            pytest.param(Costs().refined(2), 32, 2 * held, stages, makespan, 0.01, marks=LONG)
            for stages in (loop(8, 2), vee(8))
            for held, makespan in ((8, 99.5), (7, 100.5))
        ),
        pytest.param(Costs().refined(2), 32, 12, vee(8), 101.5, 0.01, marks=LONG),
        # Memory is short.
        pytest.param(Costs().refined(2), 32, 10, vee(8), 104.5, 0.02, marks=LONG),
        (Costs().refined(2), 32, 8, vee(8), 108.5, 0.049),
        # It found 28 before, where a V takes 26.5.
        (Costs().refined(2), 8, 6, None, 26.5, 0.01),
        # Stages differ.
        (UNEVEN, 8, None, None, 72, 0.2),
    ],
)
def test_it_finds_a_short_schedule(costs, num_microbatches, limit, stages, makespan, above):
    num_devices = 4 if stages is None else 8
    share = None if stages or costs is UNEVEN else 2
    found = list_schedule(costs, num_devices, num_microbatches, limit, share, stage_devices=stages)
    timeline = simulate(found, costs)
    assert timeline.makespan == makespan
    assert limit is None or max(timeline.peak_activations) <= limit
    limits = timeline.peak_activations if limit is None else [limit] * num_devices
    bound = lower_bound(costs, found.stage_devices, num_microbatches, limits)
    assert makespan <= (1 + above) * bound


def test_stages_follow_from_costs_or_placement():
    found = list_schedule(Costs([1] * 6), 3, 4)
    assert found.num_stages == 6
    assert list_schedule(Costs([1] * 6), 3, 4) == found
    found = list_schedule(Costs(), 2, 4, stage_devices=[0, 0, 1])
    assert found.stage_devices == (0, 0, 1)
    assert simulate(found).makespan == 2 * 4 * 3  # Device 0 is never idle.
    assert list_schedule(Costs(), 2, 4, num_virtual_stages=3).num_stages == 6


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


def row_of(homes, num_microbatches, policy, costs):
    found = Greedy(costs.per_stage(len(homes)), homes, num_microbatches, policy).rows()
    return found and " ".join(map(str, found[0]))


@pytest.mark.parametrize(
    ("homes", "num_microbatches", "policy", "costs", "row"),
    [
        ([0], 3, ("F", False, False, (3,)), Costs(), "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"),
        ([0], 3, ("F", False, False, (2,)), Costs(), "0F0 0F1 0I0 0I1 0W0 0F2 0I2 0W1 0W2"),
        ([0], 3, ("I", False, False, (3,)), Costs(), "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"),
        ([0], 3, ("I", False, False, (1,)), Costs(), "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"),
        ([0], 3, ("alternate", False, False, (3,)), Costs(), "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1"),
        # When 1I0 arrives, 0F2 is ready too, and what device 0 did last was a forward.
        ([0, 1], 4, ("alternate", False, False, (4, 4)), Costs([2, 1]), "0F0 0F1 0I0 0F2 0I1"),
        ([0, 1], 4, ("F", False, False, (4, 4)), Costs([2, 1]), "0F0 0F1 0F2 0F3 0I0"),
        # Of two stages the later one goes first if it shall.
        ([0, 0], 2, ("F", False, False, (4,)), Costs(), "0F0 0F1 1F0 1F1"),
        ([0, 0], 2, ("F", True, False, (4,)), Costs(), "0F0 1F0 0F1 1F1"),
        # A patient device waits for 0I1, which arrives while a weight gradient of 5 would run.
        ([0, 1], 2, ("I", False, False, (3, 3)), SLOW_W, "0F0 0F1 0I0 0W0 0I1 0W1"),
        ([0, 1], 2, ("I", False, True, (3, 3)), SLOW_W, "0F0 0F1 0I0 0I1 0W0 0W1"),
    ],
)
def test_devices_follow_their_rule_within_their_memory(homes, num_microbatches, policy, costs, row):
    assert row_of(homes, num_microbatches, Policy(*policy), costs).startswith(row)


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
    assert row_of([0, 0], 2, Policy("I", False, False, (1,)), Costs()) is None


TURNS = Schedule.from_text("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0 1F1 1B1")
WEIGHTS = Schedule.from_text("0: 0F0 0F1 0I0 0W0 0I1 0W1\n1: 1F0 1I0 1W0 1F1 1I1 1W1")


@pytest.mark.parametrize(
    ("schedule", "costs", "limits", "before", "after"),
    [
        # A weight gradient moves behind the last forward: the last device's start, and its work.
        (WEIGHTS, Costs(), (2, 2), 8, 1 + 6),
        (one_f_one_b(4, 8), Costs([1, 1, 1, 2], transfer=0.5), (4, 3, 2, 1), 60, 56),
        # Without room for two microbatches less can be done.
        (TURNS, Costs(), (2, 2), 12, 7),
        (TURNS, Costs(), (1, 1), 12, 10),
    ],
)
def test_small_changes_shorten_a_schedule(schedule, costs, limits, before, after):
    timeline = simulate(schedule, costs)
    assert timeline.makespan == before
    assert improved(timeline, limits, 200).makespan == after


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
