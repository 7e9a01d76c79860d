"""Small changes along the critical path."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule import Costs, Schedule, one_f_one_b, simulate, validate, zb_h1, zb_h2, zb_v
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


def test_a_weight_gradient_in_the_way_of_the_last_forward_moves_behind_it():
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
def test_more_trials_never_make_it_longer_and_the_result_is_valid(name, data):
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
