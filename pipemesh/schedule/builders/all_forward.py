"""Schedules that run all forwards before the first backward, and those without backwards."""

from __future__ import annotations

from pipemesh.schedule.action import Action
from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.placement import loop
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, last microbatch first; one stage a device.

    Makespan `(M + D - 1)(f + b)`, bubble `(D - 1)(f + b)`; every device holds the activations
    of all `M` microbatches. Holds for every `M`.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019, figure 2(c).

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(gpipe(2, 3))
        0: 0F0 0F1 0F2 0B2 0B1 0B0
        1: 1F0 1F1 1F2 1B2 1B1 1B0
    """
    return looped_bfs(num_devices, num_microbatches, num_virtual_stages=1)


def looped_bfs(num_devices: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """GPipe on a loop: each device finishes all microbatches of a stage, then its next stage.

    For `M >= D` the bubble is `(D - 1)(f + b)`, where `f` and `b` belong to one of `V` stages of
    a device: `V` times smaller than GPipe's on the same model. Every device holds the
    activations of all its `V M` (stage, microbatch) pairs. With fewer microbatches than devices
    every round of the loop waits for the first microbatch to come round, and the makespan is
    `(V D + M - 1)(f + b)`.

    Because the backward passes of one stage end together, its gradient can be reduced while
    the device works on the stage before.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022. The order of the
    microbatches in the backward half changes neither time nor memory; it is the reverse one, as
    in `gpipe`.

    Args:
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        num_virtual_stages: `V`, stages a device, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(looped_bfs(2, 2, num_virtual_stages=2))
        0: 0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1: 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    num_devices, num_microbatches, num_virtual_stages = check_counts(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
    )
    stages = range(num_devices * num_virtual_stages)
    rows = tuple(
        tuple(
            Action(s, "F", m) for s in stages[device::num_devices] for m in range(num_microbatches)
        )
        + tuple(
            Action(s, "B", m)
            for s in reversed(stages[device::num_devices])
            for m in reversed(range(num_microbatches))
        )
        for device in range(num_devices)
    )
    return validate(Schedule(rows, loop(num_devices, num_virtual_stages), num_microbatches))


def forward_only(num_devices: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Inference: forwards only, in groups of `D` microbatches a stage.

    A device runs a group of `D` microbatches through its first stage, then through its next:
    the group comes round the loop just when the device is free for it. If `D` divides `M`, or
    `V` is 1, the makespan is `(V M + D - 1) f` and the bubble `(D - 1) f`. Nothing is kept for a
    backward pass: one activation is in flight at a time.

    Source: the forward half of the schedules of Huang et al., 2019 (`V = 1`) and Narayanan et
    al., 2021 (`V > 1`).

    Args:
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        num_virtual_stages: `V`, stages a device, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(forward_only(2, 3))
        0: 0F0 0F1 0F2
        1: 1F0 1F1 1F2
    """
    num_devices, num_microbatches, num_virtual_stages = check_counts(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
    )
    stages = range(num_devices * num_virtual_stages)
    groups = [
        range(start, min(start + num_devices, num_microbatches))
        for start in range(0, num_microbatches, num_devices)
    ]
    rows = tuple(
        tuple(
            Action(s, "F", m)
            for group in groups
            for s in stages[device::num_devices]
            for m in group
        )
        for device in range(num_devices)
    )
    return validate(Schedule(rows, loop(num_devices, num_virtual_stages), num_microbatches))


def decode(num_devices: int, num_microbatches: int, num_virtual_stages: int = 4) -> Schedule:
    """Decoding: a token of each group of prompts in turn, and then the next token of each.

    A microbatch is a group of prompts, and a round of the loop is a token: virtual stage
    `D t + d` is device `d` at its `t`-th token, whose first stage needs what the last one made of
    the token before. The makespan is that of the forward half of `looped_bfs`: `(V M + D - 1) f`
    if `M >= D`, else `(V D + M - 1) f`. So the steady rate is that of `M` groups in `max(M, D)`
    times the time of a stage, and devices are busy from as many groups as stages on.

    Source: the forward half of Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.

    Args:
        num_devices: `D`, at least 1; also the number of stages of the model.
        num_microbatches: `M`, groups of prompts, at least 1.
        num_virtual_stages: `V`, tokens of each, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(decode(2, 2, 3))
        0: 0F0 0F1 2F0 2F1 4F0 4F1
        1: 1F0 1F1 3F0 3F1 5F0 5F1
    """
    return looped_bfs(num_devices, num_microbatches, num_virtual_stages).only_forward()
