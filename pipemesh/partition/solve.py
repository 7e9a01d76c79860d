"""`partition`: checks what was asked, finds the cut and describes it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from pipemesh.errors import PartitionError
from pipemesh.partition.build import EXACT_PAIRS, build_memory, build_problem
from pipemesh.partition.check_options import check_options
from pipemesh.partition.costs import LayerCost, Stack, as_stack
from pipemesh.partition.infeasible import explain, violation
from pipemesh.partition.lingvo_rule import lingvo_boundaries, uniform_boundaries
from pipemesh.partition.options import METHODS, Options, choice
from pipemesh.partition.result import Partition
from pipemesh.partition.search.cover import alive, cover_bottleneck
from pipemesh.partition.search.dense import Candidates, least_bottleneck, pairs
from pipemesh.partition.search.greedy import UNDECIDED, Greedy, greedy_bottleneck, singles_fit
from pipemesh.partition.search.interleaved import interleaved_below, interleaved_cut
from pipemesh.partition.search.problem import Problem
from pipemesh.partition.search.squares import even_cut


def partition(
    costs: Sequence[float] | Sequence[LayerCost] | npt.NDArray[Any],
    num_stages: int,
    *,
    speeds: Sequence[float] | None = None,
    bandwidth: float | None = None,
    overlap_transfers: bool = False,
    memory_limit: float | None = None,
    schedule: str | None = None,
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

    The bottleneck (the largest device cost) is the exact optimum; among all cuts that reach it,
    the one with the least sum of squared device costs is returned, so that leftovers spread
    evenly. No stage is empty. All options can be combined.

    Args:
        costs: one cost a layer: numbers, a flat array, or `LayerCost` values.
        num_stages: how many stages, 1 to `len(costs)`; with virtual stages, all of them.
        speeds: relative speed of each device, in stage order; a layer of cost c takes c / speed.
        bandwidth: bytes per unit of time between neighbouring devices. Each stage then takes
            `boundary_bytes / bandwidth` longer for each of its two boundaries: activations and
            gradients pass both, in both directions at once.
        overlap_transfers: a stage takes the longer of computing and transferring, not the sum.
        memory_limit: bytes of a device, for parameters, optimizer state and activations.
        schedule: the name of the pipeline schedule, on which the activations in flight depend, as
            in `pipemesh.schedule.names`: `"gpipe"`, `"1f1b"` (default), `"interleaved:V"` (default
            with virtual stages), `"looped_bfs:V"` or `"zb_h1"`. For any other, leave it out and
            give `**pipemesh.schedule.simulate(table).for_partition()`, which are the next four.
        in_flight: for each stage the most microbatches whose activations it holds at once.
        stage_devices: for each stage its device, such as `(0, 1, 1, 0)`; by default they go round.
        at_once: for each stage the number of microbatches whose backward pass follows their
            forward pass at once, which `remat="except_last"` spares; a fraction where slices of
            sequences turn.
        num_microbatches: microbatches of a step; needed with `memory_limit`, unless `in_flight`
            is given.
        optimizer_bytes_per_parameter_byte: bytes kept beside each byte of parameters: 2 for
            Adam's moments, 3 with a gradient accumulator.
        remat: `"none"` keeps all activations; `"full"` keeps the stage's input and runs the
            forward pass again; `"except_last"` spares the microbatch whose backward pass follows
            its forward pass at once.
        num_virtual_stages: V stages a device, by default what the schedule's name says, or what
            such a schedule has by default. Stage s runs on device s mod (num_stages / V), if
            `stage_devices` does not say otherwise, and a device costs the sum of its stages.
            Exact, so only for moderate sizes: the search ends in an error when it grows too large.
        same_stage: groups of layer indices that share a stage (tied weights), together with all
            layers between them.
        min_layers: the least number of layers of a stage.
        max_layers: the most layers of a stage, or `None`.
        fixed: layers at which some stage has to begin, or a mapping from stage index to its
            first layer.
        method: `"exact"`; `"lingvo"` and `"uniform"` are simple rules for comparison. They look
            at costs and the number of stages only, and a cut that breaks another option is an
            error.

    Returns:
        The `Partition`.

    Raises:
        PartitionError: a cost or an option is wrong, options contradict each other, or no cut
            satisfies them; the message says what was given, what is allowed and what to change.

    Example:
        >>> partition([100] * 6 + [101] * 2, num_stages=2).stage_costs
        (400.0, 402.0)
        >>> partition([3, 1, 1, 3], 2, speeds=[1, 3]).boundaries
        (0, 1, 4)
    """
    # Exactly the arguments: nothing else is local yet.
    asked = dict(locals())
    stack = as_stack(costs)
    options = check_options(stack, num_stages, asked)
    if choice("method", method, METHODS) != "exact":
        if method == "lingvo":
            cut = lingvo_boundaries(stack.forward + stack.backward, options.num_stages)
        else:
            cut = uniform_boundaries(stack.num_layers, options.num_stages)
        plan = describe(stack, options, cut, method)
        problem = violation(options, plan)
        if problem:
            raise PartitionError(f"the cut of method={method!r} {problem}; use method='exact'")
        return plan
    problem = build_problem(stack, options)
    found = solve(problem)
    if found is None:
        raise PartitionError(explain(stack, options, is_feasible, solve))
    boundaries, bottleneck = found
    layers = [int(problem.positions[boundary]) for boundary in boundaries]
    plan = describe(stack, options, layers, method)
    binding = _binding(stack, options, problem, bottleneck)
    return dataclasses.replace(plan, binding=binding)


def solve(problem: Problem) -> tuple[list[int], int] | None:
    """Finds the optimal cut of a problem.

    Args:
        problem: the problem in integers.

    Returns:
        The boundaries as indices into the problem's positions and the bottleneck in its units
        (with what rounding may add), or `None` if no cut is allowed.
    """
    if problem.size < problem.num_stages:
        return None
    if problem.num_virtual_stages > 1:
        return interleaved_cut(problem)
    found = _least(problem)
    if found is None:
        return None
    bottleneck, candidates = found
    return even_cut(problem, candidates, bottleneck), bottleneck


def _all_places(problem: Problem) -> Candidates | None:
    first, last = problem.windows()
    if (first > last).any():
        return None
    return [range(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]


def _is_dense(problem: Problem, candidates: Candidates) -> bool:
    return problem.times.dtype is object or pairs(candidates) <= EXACT_PAIRS


def _least(problem: Problem) -> tuple[int, Candidates] | None:
    candidates = _all_places(problem)
    if candidates is None:
        return None
    if _is_dense(problem, candidates):
        bottleneck = least_bottleneck(problem, candidates, problem.forever)
        return None if bottleneck is None else (problem.tied(bottleneck), candidates)
    if problem.monotone and singles_fit(problem) is not None:
        found = greedy_bottleneck(problem)
        if found is not UNDECIDED:
            return found
    return cover_bottleneck(problem)


def is_feasible(problem: Problem, bottleneck: int | None = None) -> bool:
    """Finds out whether a problem has an allowed cut.

    Args:
        problem: the problem.
        bottleneck: the most that a device may take; `None` for no bound.

    Returns:
        Whether there is a cut.

    Raises:
        PartitionError: the search for virtual stages gave up, so that nothing is known.
    """
    if bottleneck is not None:
        # In the units of this problem a bound from another one may not fit an `int64`.
        bottleneck = min(bottleneck, problem.forever)
    if problem.size < problem.num_stages:
        return False
    if problem.num_virtual_stages > 1:
        return interleaved_below(problem, bottleneck)
    most = problem.forever if bottleneck is None else bottleneck
    candidates = _all_places(problem)
    if candidates is None:
        return False
    if _is_dense(problem, candidates):
        return least_bottleneck(problem, candidates, most + 1) is not None
    if problem.monotone:
        alone = singles_fit(problem)
        if alone is not None and alone <= most:
            return Greedy(problem).forward(most)[0] is not None
    return alive(problem, candidates, most) is not None


def _binding(stack: Stack, options: Options, problem: Problem, bottleneck: int) -> tuple[str, ...]:
    """Which options keep the bottleneck up: those without which a smaller one is feasible."""
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
        largest = np.diff(problem.prefix(stage))
        atom = int(np.argmax(largest))
        if problem.tied(int(largest[atom])) >= bottleneck:
            begin, end = int(problem.positions[atom]), int(problem.positions[atom + 1])
            return (stack.label(begin) if end == begin + 1 else f"layers {begin} to {end - 1}",)
    return ()


def describe(stack: Stack, options: Options, cut: Sequence[int], method: str) -> Partition:
    """Computes what a cut costs, in the user's units.

    Args:
        stack: the costs.
        options: checked options.
        cut: S + 1 layer indices.
        method: how the cut was found.

    Returns:
        The partition, without what binds.
    """
    devices, layers = options.stage_devices, stack.num_layers
    again = options.recomputed()
    costs: list[float] = []

    def transfer(stage: int) -> float:
        """Time to cross the boundary in front of a stage."""
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
