"""Blocks that can be repeated on a loop or a V: found by trying all with even steps.

A way of a microbatch goes over the devices in legs: on a V down, up, and the gradient down and up
again. A block is even if each leg takes the same number of ticks from device to device. All even
blocks with short steps and turns are tried, and those kept in which no two steps of a device
meet, however often the block is repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import product

# Ticks from device to device within a leg, and from one leg to the next.
_STEPS = range(1, 5)
# A way with more legs has too many blocks to try.
_MOST_LEGS = 4
# How much longer than its work a period may be, where little can be held.
_MOST_PERIODS = 4


def even_blocks(
    placement: Sequence[int], num_devices: int, limits: Sequence[int], most: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Even blocks that hold about as much as devices may.

    Args:
        placement: for each stage its device; each leg must meet every device once.
        num_devices: how many devices there are.
        limits: for each device how many (stage, microbatch) pairs it may hold.
        most: how many blocks are wanted.

    Returns:
        The period of each and its offsets, as `pipemesh.schedule.repeat.repeated` takes them. Those
        that hold most come first, for they wait least. None if the placement is neither a loop nor
        a V, or has more than two stages a device.

    Example:
        >>> even_blocks((0, 1), 2, [2, 1], most=1)
        [(3, (0, 1, 2, 4))]
    """
    devices = (*placement, *reversed(placement))
    legs = [devices[i : i + num_devices] for i in range(0, len(devices), num_devices)]
    if len(legs) > _MOST_LEGS or any(sorted(leg) != list(range(num_devices)) for leg in legs):
        return []
    shortest = 3 * len(legs) // 2
    for period in range(shortest, shortest * _MOST_PERIODS):
        fitting = (
            (-held, offsets)
            for offsets in _offsets(len(legs), num_devices)
            if _never_meet(offsets, devices, period)
            and (held := _held(offsets, devices, period, limits)) <= 1
        )
        found = heapq.nsmallest(most, fitting)
        if found:
            return [(period, offsets) for _, offsets in found]
    return []


def _offsets(num_legs: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    for steps, turns in product(
        product(_STEPS, repeat=num_legs), product(_STEPS, repeat=num_legs - 1)
    ):
        offsets: list[int] = []
        begin = 0
        for step, turn in zip(steps, (*turns, 0), strict=True):
            offsets += range(begin, begin + step * num_devices, step)
            begin = offsets[-1] + turn
        yield tuple(offsets)


def _never_meet(offsets: Sequence[int], devices: Sequence[int], period: int) -> bool:
    taken: set[tuple[int, int]] = set()
    for offset, device in zip(offsets, devices, strict=True):
        slot = (device, offset % period)
        if slot in taken:
            return False
        taken.add(slot)
    return True


def _held(
    offsets: Sequence[int], devices: Sequence[int], period: int, limits: Sequence[int]
) -> float:
    """About what share of its limit the fullest device holds in the steady state."""
    ticks = [0.0] * len(limits)
    half = len(devices) // 2
    for stage in range(half):
        # To the end of a weight gradient right after the input gradient.
        ticks[devices[stage]] += offsets[2 * half - 1 - stage] + 2 - offsets[stage]
    return max(t / (period * limit) for t, limit in zip(ticks, limits, strict=True))
