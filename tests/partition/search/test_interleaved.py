"""Device by device, against all cuts one after the other."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.partition.search.interleaved import interleaved_below, interleaved_cut
from tests.partition.search.problems import SEEDS, cuts_of, limits, problem_of, squares, stack_of

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
    found = interleaved_cut(problem)
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
    assert interleaved_below(problem, None) == (best is not None)
    if best is not None:
        assert interleaved_below(problem, best)
        assert not best or not interleaved_below(problem, best - 1)
