"""Cuts where devices own several stages, and the order in which they are cut."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.virtual_stages import Walk, virtual_cut, virtual_has_cut
from tests.partition.problems import SEEDS, cuts_of, limits, problem_of, squares, stack_of

PLACES = [
    {"num_virtual_stages": 2},
    {"stage_devices": (0, 1, 1, 0)},
    {"stage_devices": (1, 0, 0, 1)},
    {"stage_devices": (0, 1, 0, 0)},
    {"stage_devices": (0, 0, 0, 0)},
]


def interleaved_problem(seed):
    random = Random(seed)
    layers = stack_of(random, fewest=3)
    places = random.choice(PLACES)
    options = limits(random, len(layers), 4) | places
    if "speeds" in options:
        options["speeds"] = options["speeds"][: max(options.get("stage_devices", (0, 1))) + 1]
    if "stage_devices" in places and "memory_limit" in options:
        options["in_flight"] = random.choices(range(1, options["num_microbatches"] + 1), k=4)
    if random.random() < 0.5:
        options["bandwidth"] = random.choice([0.5, 2])
    if random.random() < 0.3:
        options["min_layers"] = min(2, len(layers) // 4, options.get("max_layers", 2))
    return problem_of(layers, 4, **options)


interleaved_problems = st.builds(interleaved_problem, seed=SEEDS)


def keys_of(problem):
    """For each allowed cut the largest device sum, and both sums of squares."""
    homes, memory = problem.stage_devices, problem.memory
    keys = {}
    for cut, times in cuts_of(problem):
        devices = range(problem.num_devices)
        sums = [sum(t for t, d in zip(times, homes, strict=True) if d == n) for n in devices]
        if memory is not None:
            held = [0 for _ in devices]
            for stage, home in enumerate(homes):
                held[home] += int(memory.units(stage, cut[stage], cut[stage + 1]))
            if max(held) > memory.limit:
                continue
        keys[cut] = max(sums), squares(sums), squares(times)
    return keys


@settings(max_examples=80)
@given(interleaved_problems)
def test_no_cut_has_a_smaller_sum_or_is_more_even(problem):
    if problem.size < problem.num_stages:
        return
    keys = keys_of(problem)
    found = virtual_cut(problem)
    if not keys:
        assert found is None
        return
    cut, bottleneck = found
    assert keys[tuple(cut)] == min(keys.values())
    assert bottleneck == min(keys.values())[0]


@settings(max_examples=80)
@given(interleaved_problems)
def test_below_the_least_sum_there_is_none(problem):
    if problem.size < problem.num_stages:
        return
    best = min((key[0] for key in keys_of(problem).values()), default=None)
    assert virtual_has_cut(problem, None) == (best is not None)
    if best is not None:
        assert virtual_has_cut(problem, best)
        assert not best or not virtual_has_cut(problem, best - 1)


@st.composite
def homes(draw):
    drawn = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    return tuple(sorted(set(drawn)).index(home) for home in drawn)


@pytest.mark.parametrize("num_devices", [1, 2, 5])
def test_in_a_v_two_walkers_meet_and_nothing_else_is_open(num_devices):
    walk = Walk.over((*range(num_devices), *reversed(range(num_devices))))
    assert walk.starts == ()
    for step in range(1, num_devices):
        assert walk.open[step] == (step, 2 * num_devices - step)
    assert walk.open[num_devices] == ()
    assert walk.closed[num_devices] == (num_devices,)


@given(homes())
def test_no_boundary_is_placed_first_without_need(homes):
    """Each of them is between two stages of other steps, and some stage would know no end."""
    walk = Walk.over(homes)
    for spared in walk.starts:
        known = {0, len(homes), *walk.starts} - {spared}
        blind = False
        for stage in sorted(range(len(homes)), key=lambda s: (homes[s], s)):
            blind |= stage not in known and stage + 1 not in known
            known |= {stage, stage + 1}
        assert blind
