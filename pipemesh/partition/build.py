"""From costs and checked options to a problem in integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipemesh.partition.costs import Stack
from pipemesh.partition.integers import Ints, decimal
from pipemesh.partition.memory import MemoryModel, memory_model
from pipemesh.partition.options import Options
from pipemesh.partition.search.problem import ComputeTimes, Problem

EXACT_PAIRS = 300_000
"""Up to so many pairs of boundaries over all stages, every number is an exact integer."""

_EXACT_INTERLEAVED_SIZE = 400


def allowed_positions(layers: int, groups: Sequence[Sequence[int]]) -> Ints:
    """Lists the boundaries that groups leave.

    Args:
        layers: how many layers there are.
        groups: rising layer indices that share a stage, and so does all between them.

    Returns:
        Layer indices, 0 and `layers` included.
    """
    allowed = np.ones(layers + 1, dtype=bool)
    for group in groups:
        allowed[group[0] + 1 : group[-1] + 1] = False
    return np.flatnonzero(allowed)


def build_memory(
    stack: Stack, options: Options, positions: Ints, exact: bool
) -> MemoryModel | None:
    """Builds the memory model, also where there is no limit.

    Args:
        stack: the costs.
        options: checked options.
        positions: allowed boundaries.
        exact: see `memory_model`.

    Returns:
        The model, or `None` if the costs do not say enough, or nothing what is in flight.
    """
    flights = options.flights()
    if not stack.detailed or flights is None:
        return None
    return memory_model(
        stack,
        positions,
        limit=options.memory_limit,
        optimizer_bytes_per_parameter_byte=options.optimizer_bytes_per_parameter_byte,
        flights=flights,
        remat=options.remat,
        exact=exact,
    )


def build_problem(stack: Stack, options: Options) -> Problem:
    """Turns costs and options into a problem in integers.

    Args:
        stack: the costs.
        options: checked options.

    Returns:
        The problem; it may have no solution.
    """
    stages = options.num_stages
    positions = allowed_positions(stack.num_layers, options.same_stage)
    size = int(positions.size) - 1
    if options.num_virtual_stages > 1:
        exact = size <= _EXACT_INTERLEAVED_SIZE
    else:
        exact = stages * max(size - stages + 1, 0) ** 2 <= EXACT_PAIRS
    speeds = options.speeds or (1.0,) * options.num_devices
    wanted = [
        (decimal(speeds[device]), again)
        for device, again in zip(options.stage_devices, options.recomputed(), strict=True)
    ]
    kinds = tuple(dict.fromkeys(wanted))
    index = {kind: number for number, kind in enumerate(kinds)}
    # One device sends nothing to itself.
    bandwidth = options.bandwidth if options.num_devices > 1 else None
    times = ComputeTimes.build(
        stack,
        positions,
        kinds,
        None if bandwidth is None else decimal(bandwidth),
        exact,
    )
    memory = None
    if options.memory_limit is not None:
        memory = build_memory(stack, options, positions, exact)
    return Problem(
        positions=positions,
        num_stages=stages,
        times=times,
        kind_of_stage=tuple(index[kind] for kind in wanted),
        overlapped=options.overlap_transfers,
        memory=memory,
        min_layers=options.min_layers,
        max_layers=options.max_layers,
        barriers=tuple(np.searchsorted(positions, options.fixed).tolist()),
        pinned=tuple(
            (stage, int(np.searchsorted(positions, layer))) for stage, layer in options.pinned
        ),
        num_virtual_stages=options.num_virtual_stages,
        stage_devices=options.stage_devices,
    )
