"""Why no cut is allowed, and the nearest settings that allow one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from pipemesh.errors import PartitionError
from pipemesh.partition.build import allowed_positions, build_memory, build_problem
from pipemesh.partition.costs import Stack
from pipemesh.partition.options import Options
from pipemesh.partition.result import Partition
from pipemesh.partition.search.problem import Problem
from pipemesh.partition.text import bytes_text, count_text

Solver = Callable[[Problem], tuple[list[int], int] | None]
Feasible = Callable[[Problem], bool]

_MOST_STAGE_COUNTS = 40
_MOST_HALVINGS = 6
_LIMIT_STEPS = 30
_FEW_STEPS = 5


def explain(stack: Stack, options: Options, feasible: Feasible, solve: Solver) -> str:
    """Says why a problem has no solution and what to change.

    Args:
        stack: the costs.
        options: checked options that allow no cut.
        feasible: decides whether a problem has a solution.
        solve: finds a solution.

    Returns:
        A message that names the tightest constraint and the nearest feasible settings.
    """
    places = int(allowed_positions(stack.num_layers, options.same_stage).size) - 1
    if places < options.num_stages:
        return (
            f"same_stage leaves only {count_text(places, 'piece')} of the {stack.num_layers} "
            f"layers for {options.num_stages} stages; use at most {count_text(places, 'stage')}, "
            "or smaller groups"
        )

    def works(changed: Options, costs: Stack = stack) -> bool:
        try:
            return feasible(build_problem(costs, changed))
        except PartitionError:
            # The search for virtual stages gave up: nothing is known, so nothing is promised.
            return False

    active = options.active()
    alone = [name for name in active if works(options.without(name))]
    if "memory_limit" in active and (alone[:1] == ["memory_limit"] or active == ("memory_limit",)):
        return _explain_memory(stack, options, works, solve)
    given = " and ".join(_given(options, name) for name in active)
    start = (
        f"no cut of {stack.num_layers} layers into {options.num_stages} stages satisfies {given}"
    )
    if not alone:
        return f"{start}; at least two of these options have to give way"
    hints = [f"without {name}" for name in alone]
    if "max_layers" in alone and options.max_layers is not None:
        larger = range(options.max_layers + 1, stack.num_layers + 1)
        nearest = _first(larger, lambda n: works(dataclasses.replace(options, max_layers=n)))
        if nearest:
            hints.insert(0, f"from max_layers={nearest}")
    if "min_layers" in alone:
        smaller = range(options.min_layers - 1, 0, -1)
        nearest = _first(smaller, lambda n: works(dataclasses.replace(options, min_layers=n)))
        if nearest:
            hints.insert(0, f"with min_layers={nearest}")
    stages = _nearest_stages(stack, options, works, downwards=True)
    if stages:
        hints.append(f"with {stages} stages")
    return f"{start}; it is feasible {', or '.join(hints)}"


def _given(options: Options, name: str) -> str:
    if name == "memory_limit":
        return f"memory_limit={bytes_text(options.memory_limit or 0)}"
    if name == "fixed":
        return f"fixed={dict(options.pinned) if options.pinned else list(options.fixed)}"
    if name == "same_stage":
        return f"same_stage={[list(group) for group in options.same_stage]}"
    return f"{name}={getattr(options, name)}"


def _first(numbers: range, works: Callable[[int], bool]) -> int | None:
    return next((n for n in itertools.islice(numbers, _MOST_STAGE_COUNTS) if works(n)), None)


def _nearest_stages(
    stack: Stack, options: Options, works: Callable[[Options], bool], downwards: bool
) -> int | None:
    """The number of stages nearest to the given one that allows a cut."""
    # What a table says is for its own number of stages.
    if options.speeds is not None or options.schedule is None:
        return None
    step = options.num_virtual_stages
    count = growth = options.num_stages
    tried = 0
    most = _MOST_STAGE_COUNTS if step == 1 else _FEW_STEPS
    while count < stack.num_layers and tried < most:
        # One by one at first, then in growing strides.
        growth = step if tried < _MOST_STAGE_COUNTS // 2 else max(step, growth // 4 // step * step)
        count = min(count + growth, stack.num_layers // step * step)
        for candidate in (count, 2 * options.num_stages - count):
            if candidate < step or (candidate < options.num_stages and not downwards):
                continue
            pins = all(stage < candidate for stage, _ in options.pinned)
            if pins and len(options.fixed) < candidate:
                if works(dataclasses.replace(options, num_stages=candidate)):
                    return candidate
        tried += 1
        growth = count
    return None


def _explain_memory(
    stack: Stack,
    options: Options,
    works: Callable[..., bool],
    solve: Solver,
) -> str:
    flights = options.flights()
    assert options.memory_limit is not None and flights is not None
    limit = options.memory_limit
    total = stack.parameter_bytes.sum() + stack.activation_bytes.sum() + stack.boundary_bytes.sum()
    factor = 1 + options.optimizer_bytes_per_parameter_byte + max(flights)
    low, high = limit, limit
    while not works(dataclasses.replace(options, memory_limit=high)):
        low, high = high, high * 2
        if low > factor * float(total):
            # All layers on one device would fit: the search for virtual stages gave up.
            return (
                f"memory_limit={bytes_text(limit)} allows no cut, and the search for the least "
                "limit with virtual stages grew too large; use a larger limit, fewer virtual "
                "stages, or keep layers together with same_stage"
            )
    # Until both are the same in a message; what a cut holds is a limit that works, too.
    for _ in range(_LIMIT_STEPS):
        if bytes_text(low, up=True) == bytes_text(high, up=True):
            break
        middle = (low + high) / 2
        enough = dataclasses.replace(options, memory_limit=middle)
        if not works(enough):
            low = middle
            continue
        held = max(_held(stack, enough, solve)[0])
        # Long digits are rounded, which may make it too small.
        high = held if works(dataclasses.replace(options, memory_limit=held)) else middle
    start = _tightest(stack, dataclasses.replace(options, memory_limit=high), solve, limit)
    hints: list[str] = []
    stages = _nearest_stages(stack, options, works, downwards=False)
    if stages:
        hints.append(f"from {stages} stages")
    microbatches = _nearest_microbatches(stack, options, works)
    if microbatches:
        hints.append(f"from {microbatches} microbatches (of the same batch, so smaller ones)")
    if options.remat == "none" and works(dataclasses.replace(options, remat="full")):
        hints.append("with remat='full'")
    hints.append(f"from a memory_limit of {bytes_text(high, up=True)}")
    return f"{start}; feasible {', or '.join(hints)}"


def _held(stack: Stack, enough: Options, solve: Solver) -> tuple[list[float], list[int]]:
    """Bytes that each device holds in the cut found under a limit that allows one, and the cut."""
    problem = build_problem(stack, enough)
    found = solve(problem)
    memory = build_memory(stack, enough, np.arange(stack.num_layers + 1), exact=False)
    assert found is not None and memory is not None
    cut = [int(problem.positions[place]) for place in found[0]]
    held = [0.0] * enough.num_devices
    for stage, (begin, end) in enumerate(itertools.pairwise(cut)):
        units = memory.units(stage, np.asarray(begin), np.asarray(end))
        held[enough.stage_devices[stage]] += float(int(units) * memory.unit)
    return held, cut


def _tightest(stack: Stack, enough: Options, solve: Solver, limit: float) -> str:
    held, cut = _held(stack, enough, solve)
    worst = max(range(len(held)), key=lambda device: held[device])
    if enough.num_virtual_stages > 1:
        who = f"device {worst}"
    else:
        stage = enough.stage_devices.index(worst)
        begin, end = cut[stage], cut[stage + 1]
        layers = stack.label(begin) if end == begin + 1 else f"layers {begin} to {end - 1}"
        who = f"stage {stage} ({layers})"
    return (
        f"memory_limit is too tight: even in the cut that needs least, {who} needs "
        f"{bytes_text(held[worst], up=True)}, limit is {bytes_text(limit)}"
    )


def _nearest_microbatches(stack: Stack, options: Options, works: Callable[..., bool]) -> int | None:
    """The least number of microbatches, at the same batch, that allows a cut."""
    given = options.num_microbatches
    if given is None or options.schedule is None:
        return None

    def enough(count: int) -> bool:
        # The same batch in more microbatches: each holds less.
        scaled = dataclasses.replace(
            stack,
            activation_bytes=stack.activation_bytes * (given / count),
            boundary_bytes=stack.boundary_bytes * (given / count),
            shared_bytes=stack.shared_bytes * (given / count),
        )
        return works(dataclasses.replace(options, num_microbatches=count), scaled)

    for doubling in range(_MOST_HALVINGS):
        low, high = given << doubling, given << (doubling + 1)
        if enough(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high
    return None


def violation(options: Options, plan: Partition) -> str:
    """Says which option a cut breaks.

    Args:
        options: checked options.
        plan: a cut.

    Returns:
        A clause, or nothing.
    """
    memory = plan.device_memory
    if options.memory_limit is not None and memory is not None:
        worst = max(range(len(memory)), key=lambda device: memory[device])
        if memory[worst] > options.memory_limit:
            return (
                f"breaks memory_limit: device {worst} needs {bytes_text(memory[worst], up=True)}, "
                f"limit is {bytes_text(options.memory_limit)}"
            )
    for group in options.same_stage:
        inside = [place for place in plan.boundaries if group[0] < place <= group[-1]]
        if inside:
            return f"breaks same_stage: it cuts {list(group)} at layer {inside[0]}"
    missing = [layer for layer in options.fixed if layer not in plan.boundaries]
    missing += [layer for stage, layer in options.pinned if plan.boundaries[stage] != layer]
    if missing:
        return f"breaks fixed: the stage asked for does not begin at layer {missing[0]}"
    for stage, layers in enumerate(plan.stages):
        if options.max_layers is not None and len(layers) > options.max_layers:
            return f"breaks max_layers={options.max_layers}: stage {stage} has {len(layers)}"
        if options.min_layers > 1 and len(layers) < options.min_layers:
            return f"breaks min_layers={options.min_layers}: stage {stage} has {len(layers)}"
    return ""
