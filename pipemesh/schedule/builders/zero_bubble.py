"""Zero bubble on one stage a device: the backward is split, and weight gradients fill the gaps."""

from __future__ import annotations

from collections.abc import Callable

from pipemesh.schedule.action import Action
from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.placement import loop
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate


def zb_h1(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero bubble within the memory of 1F1B: a third of its bubble.

    For `M >= D` and `w <= min(f, i)`, the published regime, the bubble is
    `(D - 1)(f + i - w)`. Where weight gradients are the longest part it is
    `(D - 1) max(f, i, f + i - w)`: then nothing is left to fill the gaps with. Every device holds
    `min(M, D)` microbatches, as many as 1F1B's first device.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.1 and figure 3 (top).

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(zb_h1(2, 3))
        0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return _zero_bubble(
        num_devices,
        num_microbatches,
        warm_up=lambda device, devices: devices - device,
        delay=lambda device: device,
    )


def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero bubble with up to twice the memory of 1F1B: no device is idle between its actions.

    For `M >= 2 D - 1` and `i <= f`, the largest own-span bubble of a device is
    `(D - 1)(f + i - 2 w)`, as published, and 0 where that is negative; for other costs it is
    `(D - 1) max(0, i - f, f + i - 2 w)`. The bubble within the makespan is never 0, since the
    last device starts `(D - 1) f` late: it is `(D - 1) f` if `f + i <= 2 w` and `i <= 2 f`.
    Every device holds `min(M, 2 D - 1)` microbatches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.2 and figure 3
    (bottom).

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(zb_h2(2, 3))
        0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    return _zero_bubble(
        num_devices,
        num_microbatches,
        warm_up=lambda device, devices: 2 * (devices - device) - 1,
        delay=lambda device: 2 * device,
    )


def _zero_bubble(
    num_devices: int,
    num_microbatches: int,
    warm_up: Callable[[int, int], int],
    delay: Callable[[int], int],
) -> Schedule:
    """Forwards, then rounds of one `I`, one `W` that lags by `delay` microbatches, one `F`.

    A device holds `warm_up + delay` microbatches; both published schedules choose the delay so
    that this is the same number on every device.
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        ahead = min(num_microbatches, warm_up(device, num_devices))
        lag = min(num_microbatches, delay(device))
        row = [Action(device, "F", m) for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(Action(device, "I", m))
            if m >= lag:
                row.append(Action(device, "W", m - lag))
            if m + ahead < num_microbatches:
                row.append(Action(device, "F", m + ahead))
        row += [Action(device, "W", m) for m in range(num_microbatches - lag, num_microbatches)]
        rows.append(tuple(row))
    return validate(Schedule(tuple(rows), loop(num_devices), num_microbatches))
