"""What a search is asked for: where stages may lie and how much each device may hold."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

from pipemesh.errors import ScheduleError
from pipemesh.schedule.checks import check_counts, check_indices, check_type, short
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.placement import loop, vee

MemoryLimit = int | Sequence[int] | None
"""How many (stage, microbatch) pairs a device may hold: one number or one a device."""


def placements_of(
    costs: Costs,
    num_devices: int,
    num_virtual_stages: int | None,
    stage_devices: Sequence[int] | None,
) -> list[tuple[int, ...]]:
    """Every way to spread the stages that a search looks at, none of them twice.

    Args:
        costs: with one value a stage they say how many stages there are.
        num_devices: at least 1.
        num_virtual_stages: stages a device; by default what `costs` say, else 1.
        stage_devices: for each stage its device, to fix the placement.

    Returns:
        What was given, or else a loop, and with two stages a device a V, too.

    Raises:
        ScheduleError: the numbers do not fit together.

    Example:
        >>> placements_of(Costs(), 2, 2, None)
        [(0, 1, 0, 1), (0, 1, 1, 0)]
    """
    check_type("costs", costs, Costs)
    if stage_devices is not None:
        devices = check_indices("stage_devices", stage_devices)
        if sorted(set(devices)) != list(range(num_devices)):
            raise ScheduleError(
                f"stage_devices is {devices}; every device from 0 to {num_devices - 1} "
                "must have a stage, and no other"
            )
        return [devices]
    if num_virtual_stages is None:
        num_stages = costs.num_stages or num_devices
        if num_stages % num_devices:
            raise ScheduleError(
                f"the costs are for {num_stages} stages, which is no multiple of "
                f"{num_devices} devices; give stage_devices"
            )
        num_virtual_stages = num_stages // num_devices
    (num_virtual_stages,) = check_counts(num_virtual_stages=num_virtual_stages)
    placements = [loop(num_devices, num_virtual_stages)]
    if num_virtual_stages == 2 and num_devices > 1:
        placements.append(vee(num_devices))
    return placements


def limits_of(
    memory_limit: MemoryLimit,
    stage_devices: Sequence[int],
    num_devices: int,
    num_microbatches: int,
) -> tuple[int, ...]:
    """The limit of each device.

    Args:
        memory_limit: one number, or one a device, or None.
        stage_devices: for each stage its device.
        num_devices: at least 1.
        num_microbatches: at least 1.

    Returns:
        For each device how many (stage, microbatch) pairs it may hold.

    Raises:
        ScheduleError: a limit is below the number of stages of its device.

    Example:
        >>> limits_of(3, (0, 1, 0, 1), 2, 8)
        (3, 3)
    """
    stages = [list(stage_devices).count(device) for device in range(num_devices)]
    if memory_limit is None:
        return tuple(count * num_microbatches for count in stages)
    if hasattr(memory_limit, "__len__"):
        limits = check_indices("memory_limit", memory_limit, num_devices)
    else:
        try:
            limits = (operator.index(cast(int, memory_limit)),) * num_devices
        except TypeError:
            raise ScheduleError(
                f"memory_limit is {short(memory_limit)}; give an integer or one a device"
            ) from None
    for device, (limit, count) in enumerate(zip(limits, stages, strict=True)):
        if limit < count:
            raise ScheduleError(
                f"memory_limit of device {device} is {limit}, but it has {count} stages and must "
                f"hold one microbatch of each; it must be at least {count}"
            )
    return limits
