"""`partition`: finds the best cut and describes it, or explains why there is none."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipemesh.errors import PartitionError
from pipemesh.partition.bottleneck import has_cut, least_bottleneck
from pipemesh.partition.costs import Floats, LayerCost, Stack, as_stack
from pipemesh.partition.even_cut import even_cut
from pipemesh.partition.options import METHODS, Options, check_options, choice
from pipemesh.partition.problem import Problem, allowed_positions, build_memory, build_problem
from pipemesh.partition.result import Partition
from pipemesh.partition.virtual_stages import virtual_cut, virtual_has_cut
from pipemesh.text import bytes_text, count_text

if TYPE_CHECKING:
    from pipemesh.schedule import Schedule

_MOST_STAGE_COUNTS = 40
_MOST_DOUBLINGS = 6
_LIMIT_STEPS = 30
_FEW_STEPS = 5


def partition(
    costs: Sequence[float] | Sequence[LayerCost] | npt.NDArray[Any],
    num_stages: int,
    *,
    speeds: Sequence[float] | None = None,
    bandwidth: float | None = None,
    overlap_transfers: bool = False,
    memory_limit: float | None = None,
    schedule: str | Schedule | None = None,
    in_flight: Sequence[int] | None = None,
    stage_devices: Sequence[int] | None = None,
    at_once: Sequence[int | Fraction] | None = None,
    num_microbatches: int | None = None,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    remat: str = "none",
    num_virtual_stages: int | None = None,
    same_stage: Sequence[Collection[int]] = (),
    min_layers: int = 1,
    max_layers: int | None = None,
    fixed: Collection[int] | Mapping[int, int] = (),
    method: str = "exact",
) -> Partition:
    """Cuts layers into contiguous stages with the smallest possible bottleneck.

    The bottleneck (the largest device cost) is the exact optimum. Among all cuts that reach it, the
    result has the least sum of squared device costs, which spreads the rest evenly. No stage is
    empty. All options can be combined.

    Args:
        costs: one cost a layer: numbers, a flat array, or `LayerCost` values.
        num_stages: the number of stages, 1 to `len(costs)`; counts every virtual stage.
        speeds: relative speed of each device, in stage order; a layer of cost c takes c / speed.
        bandwidth: bytes per unit of time between neighbouring devices, both directions at once.
            Each stage then takes `boundary_bytes / bandwidth` longer for each of its two
            boundaries, where activations and gradients cross.
        overlap_transfers: a stage takes the longer of computing and transferring, not the sum.
        memory_limit: bytes of a device, for parameters, optimizer state and activations.
        schedule: the pipeline schedule, which determines the activations in flight: a `Schedule`,
            `"file:PATH"` of one, or any name of `pipemesh.schedule.names`; by default `"1f1b"`, or
            with virtual stages `"interleaved:V"`. For `"gpipe"`, `"looped_bfs:V"`, `"zb_h1"` and
            the defaults there are formulas at any size; any other one is simulated, which needs
            `num_microbatches`. It says the next three arguments, so give it or them.
        in_flight: for each stage the most microbatches whose activations it holds at once.
        stage_devices: the device of each stage, such as `(0, 1, 1, 0)`; by default stages go round
            the devices.
        at_once: for each stage the number of microbatches whose backward pass directly follows
            their forward pass, so that `remat="except_last"` need not recompute them; fractions
            are allowed, for sequence slices.
        num_microbatches: microbatches of a step; required with `memory_limit`, unless `in_flight`
            is given.
        optimizer_bytes_per_parameter_byte: bytes kept beside each byte of parameters: 2 for
            Adam's moments, 3 with a gradient accumulator.
        remat: `"none"` keeps all activations; `"full"` keeps the stage's input and runs the
            forward pass again; `"except_last"` does the same, except for microbatches whose
            backward pass directly follows their forward pass.
        num_virtual_stages: V stages a device; by default the number that the schedule has. Stage
            s runs on device s mod (num_stages / V) unless `stage_devices` is given. A device costs
            the sum of its stages. Only for moderate sizes: a search that grows too large raises
            an error.
        same_stage: groups of layer indices that share a stage (tied weights), together with all
            layers between them.
        min_layers: the least number of layers of a stage.
        max_layers: the largest number of layers of a stage, or `None` for no limit.
        fixed: layers at which some stage must begin, or a mapping from stage index to its first
            layer.
        method: `"exact"`, or a simple rule for comparison: `"lingvo"` or `"uniform"`. The rules use
            only costs and the number of stages; a cut that breaks another option is an error.

    Returns:
        The `Partition`.

    Raises:
        PartitionError: a cost or an option is invalid, options contradict each other, or no cut
            satisfies them; the message says what to change.

    Example:
        >>> partition([100] * 6 + [101] * 2, num_stages=2).stage_costs
        (400.0, 402.0)
        >>> partition([3, 1, 1, 3], 2, speeds=[1, 3]).boundaries
        (0, 1, 4)
    """
    # Only the arguments are local yet.
    arguments = dict(locals())
    stack = as_stack(costs)
    options = check_options(stack, num_stages, arguments)
    if choice("method", method, METHODS) != "exact":
        if method == "lingvo":
            cut = lingvo_boundaries(stack.forward + stack.backward, options.num_stages)
        else:
            cut = uniform_boundaries(stack.num_layers, options.num_stages)
        plan = describe(stack, options, cut, method)
        violation = broken_option(options, plan)
        if violation:
            raise PartitionError(f"the cut of method={method!r} {violation}; use method='exact'")
        return plan
    problem = build_problem(stack, options)
    solution = solve(problem)
    if solution is None:
        raise PartitionError(explain(stack, options))
    boundaries, bottleneck = solution
    layers = [int(problem.positions[boundary]) for boundary in boundaries]
    plan = describe(stack, options, layers, method)
    binding = _binding(stack, options, problem, bottleneck)
    return dataclasses.replace(plan, binding=binding)


def solve(problem: Problem) -> tuple[list[int], int] | None:
    """Returns the best boundaries and the bottleneck in units; `None` if no cut is allowed."""
    if problem.size < problem.num_stages:
        return None
    if problem.num_virtual_stages > 1:
        return virtual_cut(problem)
    least = least_bottleneck(problem)
    if least is None:
        return None
    bottleneck, candidates = least
    return even_cut(problem, candidates, bottleneck), bottleneck


def is_feasible(problem: Problem, bottleneck: int | None = None) -> bool:
    """Returns True if some allowed cut has no device above the bottleneck."""
    if bottleneck is not None:
        # A bound in the units of another problem may not fit an `int64` in those of this one.
        bottleneck = min(bottleneck, problem.forever)
    if problem.size < problem.num_stages:
        return False
    if problem.num_virtual_stages > 1:
        return virtual_has_cut(problem, bottleneck)
    return has_cut(problem, problem.forever if bottleneck is None else bottleneck)


def _binding(stack: Stack, options: Options, problem: Problem, bottleneck: int) -> tuple[str, ...]:
    """Returns the options without which a smaller bottleneck is feasible, or the largest layer."""
    binding: list[str] = []
    names = list(options.active())
    if options.bandwidth is not None and options.num_devices > 1:
        names.append("bandwidth")
    for name in names:
        relaxed = build_problem(stack, options.without(name))
        # The units of two problems can differ.
        most = bottleneck * problem.times.unit / relaxed.times.unit
        below = math.ceil(most) - 1
        if relaxed.times.rounded or problem.times.rounded:
            # Smaller by more than rounding can do.
            below -= 2 * relaxed.size + (below >> 39)
        try:
            if below >= 0 and is_feasible(relaxed, below):
                binding.append(name)
        except PartitionError:
            binding.append(f"perhaps {name}")
    if binding:
        return tuple(binding)
    for stage in range(problem.num_stages):
        times = np.diff(problem.prefix(stage))
        largest = int(np.argmax(times))
        if problem.tied(int(times[largest])) >= bottleneck:
            begin, end = int(problem.positions[largest]), int(problem.positions[largest + 1])
            return (_layers_text(stack, begin, end),)
    return ()


def _layers_text(stack: Stack, begin: int, end: int) -> str:
    return stack.label(begin) if end == begin + 1 else f"layers {begin} to {end - 1}"


def describe(stack: Stack, options: Options, cut: Sequence[int], method: str) -> Partition:
    """Returns the partition of a cut with its costs in the user's units, without `binding`."""
    devices, layers = options.stage_devices, stack.num_layers
    again = options.recomputed()
    costs: list[float] = []

    def transfer(stage: int) -> float:
        """Returns the time to cross the boundary in front of a stage."""
        if options.bandwidth is None or devices[stage - 1 : stage] == devices[stage : stage + 1]:
            return 0.0
        if stage in (0, options.num_stages):
            return 0.0
        return float(stack.boundary_bytes[cut[stage] - 1]) / options.bandwidth

    for stage, (begin, end) in enumerate(itertools.pairwise(cut)):
        forward = stack.forward[begin:end] * (1 + float(again[stage]))
        compute = math.fsum([*forward.tolist(), *stack.backward[begin:end].tolist()])
        if options.speeds is not None:
            compute /= options.speeds[devices[stage]]
        crossing = transfer(stage) + transfer(stage + 1)
        overlapped = options.overlap_transfers
        costs.append(max(compute, crossing) if overlapped else compute + crossing)
    positions = np.arange(layers + 1)
    memory = build_memory(stack, options, positions, exact=layers <= 10_000)
    held = None
    if memory is not None:
        held = tuple(
            float(int(memory.units(stage, np.asarray(begin), np.asarray(end))) * memory.unit)
            for stage, (begin, end) in enumerate(itertools.pairwise(cut))
        )
    return Partition(
        boundaries=tuple(int(layer) for layer in cut),
        stage_costs=tuple(costs),
        num_virtual_stages=options.num_virtual_stages,
        placement=options.placement,
        stage_memory=held,
        memory_limit=options.memory_limit,
        method=method,
        layer_names=stack.names if any(stack.names) else (),
    )


def lingvo_boundaries(costs: Floats, num_stages: int) -> list[int]:
    """Returns the cut of lingvo's `PartitionSequentialLayers`, which may leave stages empty."""
    # lingvo 0.14.2, `lingvo/core/gpipe.py`, with forward FLOPs as costs: layer i goes to stage
    # floor(S * (share of the cost of the layers 0 to i)), the last stage at most. The share
    # includes layer i, so layers move one stage too late or too early and a stage can stay empty: 4
    # equal layers over 4 stages become 0, 1, 1 and 2 layers. Summed one after
    # the other, as lingvo does: the rule depends on the last bit of each sum.
    sums = np.cumsum(costs)
    stage = np.minimum((sums / sums[-1] * num_stages).astype(np.int64), num_stages - 1)
    return [int(np.searchsorted(stage, index)) for index in range(num_stages)] + [costs.size]


def uniform_boundaries(num_layers: int, num_stages: int) -> list[int]:
    """Returns stages of equally many layers; the first stages take the layers left over."""
    size, over = divmod(num_layers, num_stages)
    return [stage * size + min(stage, over) for stage in range(num_stages + 1)]


def explain(stack: Stack, options: Options) -> str:
    """Returns why no cut is allowed: the tightest constraint, and the nearest feasible settings."""
    groups = int(allowed_positions(stack.num_layers, options.same_stage).size) - 1
    if groups < options.num_stages:
        return (
            f"same_stage leaves only {count_text(groups, 'piece')} of the {stack.num_layers} "
            f"layers for {options.num_stages} stages; use at most {count_text(groups, 'stage')}, "
            "or smaller groups"
        )
    active = options.active()
    culprits = [name for name in active if _works(stack, options.without(name))]
    if "memory_limit" in active and (
        culprits[:1] == ["memory_limit"] or active == ("memory_limit",)
    ):
        return _explain_memory(stack, options)
    constraints = " and ".join(_constraint_text(options, name) for name in active)
    start = (
        f"no cut of {stack.num_layers} layers into {options.num_stages} stages satisfies "
        f"{constraints}"
    )
    if not culprits:
        return f"{start}; change at least two of these options"
    hints = [f"without {name}" for name in culprits]
    for name, word, numbers in (
        ("max_layers", "from", range((options.max_layers or 0) + 1, stack.num_layers + 1)),
        ("min_layers", "with", range(options.min_layers - 1, 0, -1)),
    ):
        nearest = _first_that_works(stack, options, name, numbers) if name in culprits else None
        if nearest:
            hints.insert(0, f"{word} {name}={nearest}")
    stages = _nearest_stages(stack, options, downwards=True)
    if stages:
        hints.append(f"with {stages} stages")
    return f"{start}; it is feasible {', or '.join(hints)}"


def _works(stack: Stack, options: Options) -> bool:
    try:
        return is_feasible(build_problem(stack, options))
    except PartitionError:
        # The search for virtual stages gave up, so the result is unknown: promise nothing.
        return False


def _constraint_text(options: Options, name: str) -> str:
    if name == "memory_limit":
        return f"memory_limit={bytes_text(options.memory_limit or 0)}"
    if name == "fixed":
        return f"fixed={dict(options.pinned) if options.pinned else list(options.fixed)}"
    if name == "same_stage":
        return f"same_stage={[list(group) for group in options.same_stage]}"
    return f"{name}={getattr(options, name)}"


def _first_that_works(stack: Stack, options: Options, name: str, values: range) -> int | None:
    for value in itertools.islice(values, _MOST_STAGE_COUNTS):
        changed: dict[str, Any] = {name: value}
        if _works(stack, dataclasses.replace(options, **changed)):
            return value
    return None


def _nearest_stages(stack: Stack, options: Options, downwards: bool) -> int | None:
    """Returns the number of stages nearest to the given one that allows a cut."""
    # Numbers of a table are for its own number of stages.
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
                if _works(stack, dataclasses.replace(options, num_stages=candidate)):
                    return candidate
        tried += 1
        growth = count
    return None


def _explain_memory(stack: Stack, options: Options) -> str:
    microbatches_in_flight = options.microbatches_in_flight()
    assert options.memory_limit is not None and microbatches_in_flight is not None
    limit = options.memory_limit
    total = stack.parameter_bytes.sum() + stack.activation_bytes.sum() + stack.boundary_bytes.sum()
    factor = 1 + options.optimizer_bytes_per_parameter_byte + max(microbatches_in_flight)
    low, high = limit, limit
    while not _works(stack, dataclasses.replace(options, memory_limit=high)):
        low, high = high, high * 2
        if low > factor * float(total):
            # All layers on one device would fit: the search for virtual stages gave up.
            return (
                f"memory_limit={bytes_text(limit)} allows no cut, and the search for the least "
                "limit with virtual stages grew too large; use a larger limit, fewer virtual "
                "stages, or keep layers together with same_stage"
            )
    # Until a message would show both as the same. The need of a cut is a limit that works, too.
    for _ in range(_LIMIT_STEPS):
        if bytes_text(low, up=True) == bytes_text(high, up=True):
            break
        middle = (low + high) / 2
        enough = dataclasses.replace(options, memory_limit=middle)
        if not _works(stack, enough):
            low = middle
            continue
        need = max(_fitting_plan(stack, enough).device_memory or ())
        # Long digits are rounded, which may make it too small.
        works = _works(stack, dataclasses.replace(options, memory_limit=need))
        high = need if works else middle
    start = _tightest(stack, dataclasses.replace(options, memory_limit=high), limit)
    hints: list[str] = []
    stages = _nearest_stages(stack, options, downwards=False)
    if stages:
        hints.append(f"from {stages} stages")
    microbatches = _nearest_microbatches(stack, options)
    if microbatches:
        hints.append(f"from {microbatches} microbatches (of the same batch, so smaller ones)")
    if options.remat == "none" and _works(stack, dataclasses.replace(options, remat="full")):
        hints.append("with remat='full'")
    hints.append(f"from a memory_limit of {bytes_text(high, up=True)}")
    return f"{start}; feasible {', or '.join(hints)}"


def _fitting_plan(stack: Stack, enough: Options) -> Partition:
    """Returns the best cut under options that allow one."""
    problem = build_problem(stack, enough)
    solution = solve(problem)
    assert solution is not None
    cut = [int(problem.positions[place]) for place in solution[0]]
    return describe(stack, enough, cut, "exact")


def _tightest(stack: Stack, enough: Options, limit: float) -> str:
    plan = _fitting_plan(stack, enough)
    memory = plan.device_memory
    assert memory is not None
    worst = max(range(len(memory)), key=lambda device: memory[device])
    if plan.num_virtual_stages > 1:
        name = f"device {worst}"
    else:
        stage = plan.stage_devices.index(worst)
        layers = plan.stages[stage]
        name = f"stage {stage} ({_layers_text(stack, layers.start, layers.stop)})"
    return (
        f"memory_limit is too tight: even in the cut that needs least, {name} needs "
        f"{bytes_text(memory[worst], up=True)}, limit is {bytes_text(limit)}"
    )


def _nearest_microbatches(stack: Stack, options: Options) -> int | None:
    """Returns the least number of microbatches of the same batch that allows a cut."""
    microbatches = options.num_microbatches
    if microbatches is None or options.schedule is None:
        return None

    def works(count: int) -> bool:
        # The same batch in more microbatches: each holds less.
        scaled = dataclasses.replace(
            stack,
            activation_bytes=stack.activation_bytes * (microbatches / count),
            boundary_bytes=stack.boundary_bytes * (microbatches / count),
            shared_bytes=stack.shared_bytes * (microbatches / count),
        )
        return _works(scaled, dataclasses.replace(options, num_microbatches=count))

    for doubling in range(_MOST_DOUBLINGS):
        low, high = microbatches << doubling, microbatches << (doubling + 1)
        if works(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if works(middle) else (middle, high)
            return high
    return None


def broken_option(options: Options, plan: Partition) -> str:
    """Returns which option a cut breaks, as a clause of a message; empty if none."""
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
        return f"breaks fixed: the fixed stage does not begin at layer {missing[0]}"
    for stage, layers in enumerate(plan.stages):
        if options.max_layers is not None and len(layers) > options.max_layers:
            return f"breaks max_layers={options.max_layers}: stage {stage} has {len(layers)}"
        if options.min_layers > 1 and len(layers) < options.min_layers:
            return f"breaks min_layers={options.min_layers}: stage {stage} has {len(layers)}"
    return ""
