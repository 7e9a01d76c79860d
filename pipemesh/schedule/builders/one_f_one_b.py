"""One forward, one backward: PipeDream-Flush, plain and interleaved."""

from __future__ import annotations

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.placement import loop
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate


def one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """After a short warm-up each device alternates one forward and one backward.

    Makespan `(M + D - 1)(f + b)`, bubble `(D - 1)(f + b)`, both as with GPipe, but device `d`
    holds the activations of only `min(M, D - d)` microbatches. Holds for every `M`.

    Source: PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training", 2021; also figure 4 (top) of Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", 2021.

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(one_f_one_b(2, 3))
        0: 0F0 0F1 0B0 0F2 0B1 0B2
        1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    return interleaved_one_f_one_b(num_devices, num_microbatches, num_virtual_stages=1)


def interleaved_one_f_one_b(
    num_devices: int, num_microbatches: int, num_virtual_stages: int = 2
) -> Schedule:
    """1F1B on a loop of `V` stages a device, in groups of `D` microbatches a stage.

    The bubble is `(D - 1)(f + b)`, where `f` and `b` belong to one of `V` stages of a device:
    `V` times smaller than 1F1B's on the same model. Device `d` holds
    `min(V M, 2 (D - d - 1) + (V - 1) D + 1)` activations for `V > 1` and `min(M, D - d)` for
    `V = 1`, where the schedule is `one_f_one_b`.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", 2021, section 2.2 and figure 4 (bottom).

    Args:
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1; for `V > 1` a multiple of `D`, as the paper demands.
        num_virtual_stages: `V`, stages a device, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Raises:
        ScheduleError: a count is below 1, or `M` is no multiple of `D` although `V > 1`.

    Example:
        >>> print(interleaved_one_f_one_b(2, 2, num_virtual_stages=2))
        0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    num_devices, num_microbatches, num_virtual_stages = check_counts(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
    )
    looped = num_virtual_stages > 1
    if looped and num_microbatches % num_devices:
        lower = num_microbatches - num_microbatches % num_devices
        nearest = " or ".join(str(m) for m in (lower, lower + num_devices) if m)
        raise ScheduleError(
            f"num_microbatches is {num_microbatches}, but interleaved 1F1B needs a multiple of "
            f"num_devices, {num_devices}; use {nearest} microbatches, or num_virtual_stages=1"
        )
    group = num_devices if looped else 1
    forwards = [
        (chunk, microbatch)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_virtual_stages)
        for microbatch in range(start, start + group)
    ]
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        first_backward = num_devices - device - 1
        if looped:
            # A gradient comes back through all later devices, and while it does two groups of
            # other stages' forwards pass: twice the way, and all but one stage of the group.
            first_backward = 2 * first_backward + (num_virtual_stages - 1) * num_devices
        ahead = min(first_backward, len(forwards))
        f = [Action(c * num_devices + device, "F", m) for c, m in forwards]
        b = [
            Action((num_virtual_stages - 1 - c) * num_devices + device, "B", m) for c, m in forwards
        ]
        row = f[:ahead]
        for forward, backward in zip(f[ahead:], b, strict=False):
            row += (forward, backward)
        rows.append((*row, *b[len(f) - ahead :]))
    devices = loop(num_devices, num_virtual_stages)
    return validate(Schedule(tuple(rows), devices, num_microbatches))
