"""One greedy run: what each rule of a policy does, and that it gets through."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule import Costs, Schedule, simulate, validate
from pipemesh.schedule.greedy import Policy, greedy


def rows(homes, num_microbatches, policy, costs=None):
    found = greedy((costs or Costs()).per_stage(len(homes)), homes, num_microbatches, policy)
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
def test_one_device_does_what_it_prefers_as_far_as_its_memory_goes(prefer, cap, row):
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


def test_the_patient_wait_for_what_is_on_its_way():
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
    found = greedy(costs.per_stage(len(homes)), homes, num_microbatches, Policy(*rule, cap))
    schedule = validate(Schedule(found, homes, num_microbatches))
    held = zip(simulate(schedule, costs).peak_activations, cap, strict=True)
    assert all(peak <= most for peak, most in held)


def test_without_a_place_for_each_stage_it_gets_stuck_and_says_so():
    assert rows([0, 0], 2, Policy("I", False, False, (1,))) is None
