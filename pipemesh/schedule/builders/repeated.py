"""V-Half and V-Min: the V of Qi et al. 2024 in a half and a third of 1F1B's memory."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.placement import vee
from pipemesh.schedule.repeat import repeated
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.validate import validate

# Two stages a device, each with a forward, an input gradient and a weight gradient.
_PERIOD = 6


def v_min(num_devices: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's memory: no device holds more than `(D + 4) // 3` microbatches' activations.

    That is `2 ((D + 4) // 3)` (stage, microbatch) pairs; two stages are a device's share of the
    model. Made for `f = i = w`: then, for `D > 2` and `M >= D`, the bubble is `(4 D - 7) f` if 3
    divides `D`, else `(4 D - 5) f`. Where the durations differ, devices wait for each other in
    every round.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, V-Min; offsets of the
    block from the authors' scheduler. How its ends are filled is this package's own.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(v_min(2, 2))
        0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    # Without a gap, forwards and input gradients would meet if 3 divides D.
    gap = 0 if num_devices % 3 else 2
    offsets = [place + (gap if place >= 2 * num_devices else 0) for place in range(4 * num_devices)]
    return _shortest(offsets, num_microbatches, 2 * ((num_devices + 4) // 3))


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """Half of 1F1B's memory: no device holds more than `D // 2 + 1` microbatches' activations.

    That is `2 (D // 2 + 1)` (stage, microbatch) pairs; two stages are a device's share of the
    model. With `f = i = w`, the case the table is made for, `D > 2` and `M >= D + 2`, the bubble is
    `(3 D - 7) f` if 2 divides `D`, else `(3 D - 4) f`.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, V-Half; offsets of the
    block from the authors' scheduler. How its ends are filled is this package's own.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(v_half(2, 2))
        0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    # Without a gap, forwards and input gradients would meet if 2 divides D.
    gap = 0 if num_devices % 2 else 3
    devices = range(num_devices)
    offsets = [
        *(2 * d for d in devices),
        *(2 * num_devices - 1 + d for d in devices),
        *(3 * num_devices + gap - 1 + 2 * d for d in devices),
        *(5 * num_devices + gap - 1 + d for d in devices),
    ]
    return _shortest(offsets, num_microbatches, 2 * (num_devices // 2 + 1))


def _shortest(offsets: Sequence[int], num_microbatches: int, limit: int) -> Schedule:
    """Which way to fill the ends is the shortest depends on `M` and `D`."""
    num_devices = len(offsets) // 4
    limits = [limit] * num_devices
    found = repeated(vee(num_devices), offsets, _PERIOD, num_microbatches, limits)
    return validate(min(found, key=lambda schedule: simulate(schedule).makespan))
