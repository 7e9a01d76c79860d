"""Small problems for the searches, and all their cuts, tried one after the other."""

import inspect
import itertools
from random import Random

import numpy as np
from hypothesis import strategies as st

from pipemesh.partition import LayerCost, partition
from pipemesh.partition.costs import as_stack
from pipemesh.partition.options import check_options
from pipemesh.partition.problem import build_problem

DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(partition).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "method"
}


def problem_of(layers, num_stages, **options):
    """The problem that `partition` would solve."""
    stack = as_stack(layers)
    return build_problem(stack, check_options(stack, num_stages, DEFAULTS | options))


def stack_of(random, fewest=1, most=8):
    """Layers and one more, so that something costs something."""
    count = random.randint(fewest, most)
    fields = ("forward", "backward", "parameter_bytes", "activation_bytes", "boundary_bytes")
    layers = [LayerCost(**{f: random.randint(0, 6) for f in fields}) for _ in range(count)]
    return [*layers, LayerCost(1, backward=1)]


def limits(random, num_layers, num_stages):
    """Options that forbid cuts and leave a problem monotone."""
    options = {}
    if random.random() < 0.5:
        options["speeds"] = random.choices([1, 2, 0.5], k=num_stages)
    if random.random() < 0.3:
        fewest = -(-num_layers // num_stages)
        options["max_layers"] = random.randint(fewest, min(fewest + 2, num_layers))
    if random.random() < 0.4:
        options["num_microbatches"] = random.randint(1, 3)
        options["memory_limit"] = random.choice([30, 50, 80])
    if num_stages > 1 and random.random() < 0.3:
        layer = random.randint(1, num_layers - 1)
        options["fixed"] = [layer]
        if random.random() < 0.5:
            stage = random.randint(1, num_stages - 1)
            options["fixed"] = {stage: min(max(layer, stage), num_layers - num_stages + stage)}
    elif num_layers > 2 and random.random() < 0.3:
        begin = random.randint(0, num_layers - 2)
        options["same_stage"] = [[begin, begin + 1]]
    return options


def monotone_problem(seed):
    random = Random(seed)
    layers = stack_of(random)
    num_stages = random.randint(1, min(4, len(layers)))
    problem = problem_of(layers, num_stages, **limits(random, len(layers), num_stages))
    assert problem.monotone
    return problem


def any_problem(seed, most=8):
    """With transfers, inputs kept and a least number of layers too."""
    random = Random(seed)
    layers = stack_of(random, most=most)
    num_stages = random.randint(1, min(4, len(layers)))
    options = limits(random, len(layers), num_stages)
    if random.random() < 0.6:
        options["bandwidth"] = random.choice([0.1, 0.25, 0.5, 1])
        options["overlap_transfers"] = random.random() < 0.5
    options["remat"] = random.choice(["none", "full", "except_last"])
    if random.random() < 0.3:
        most = options.get("max_layers") or len(layers)
        options["min_layers"] = random.randint(1, min(len(layers) // num_stages, most))
    return problem_of(layers, num_stages, **options)


# Drawn part by part, most of them would be tiny.
SEEDS = st.integers(0, 2**40)
problems = st.builds(any_problem, seed=SEEDS)
monotone_problems = st.builds(monotone_problem, seed=SEEDS)


def places_of(problem):
    """All places of each boundary; None if a boundary has none."""
    first, last = (window.tolist() for window in problem.windows())
    if any(a > b for a, b in zip(first, last, strict=True)):
        return None
    return [range(a, b + 1) for a, b in zip(first, last, strict=True)]


def cuts_of(problem, bottleneck=None):
    """Every allowed cut with the time of each stage, none above a bottleneck."""
    for inner in itertools.combinations(range(1, problem.size), problem.num_stages - 1):
        cut = (0, *inner, problem.size)
        if any(cut[boundary] != place for boundary, place in problem.pinned):
            continue
        times = [
            time_of(problem, stage, *ends) for stage, ends in enumerate(itertools.pairwise(cut))
        ]
        if None not in times and (bottleneck is None or max(times) <= bottleneck):
            yield cut, times


def time_of(problem, stage, begin, end):
    """The time of one stage; None if it is not allowed."""
    here, there = np.asarray([begin]), np.asarray([end])
    if not problem.allowed(stage, here, there)[0, 0]:
        return None
    return int(problem.stage_times(stage, here, there)[0])


def optimum(problem):
    """The least bottleneck; None if no cut is allowed."""
    return min((max(times) for _, times in cuts_of(problem)), default=None)


def squares(times):
    return sum(time * time for time in times)
