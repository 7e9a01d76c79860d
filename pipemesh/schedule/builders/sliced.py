"""Sequences cut into slices: each device takes a part of every sequence at a time."""

from __future__ import annotations

from pipemesh.schedule.action import Action
from pipemesh.schedule.builders.one_f_one_b import one_f_one_b
from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.placement import loop
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate


def seq_one_f_one_b(num_devices: int, num_microbatches: int, num_slices: int = 4) -> Schedule:
    """1F1B whose unit is a slice of a microbatch's sequences.

    With causal attention a slice needs of the slices before it only their keys and values, so the
    first slice goes on to the next stage while the second one is computed. Gradients come back
    in the reverse order: microbatches from the first, the slices of each from the last, because
    the keys and values of a slice get gradients from all slices after it.

    With `f` and `b` of a whole microbatch and slices of equal cost the bubble is
    `(D - 1)(f + b) / Q`, and device `d` holds `min(M Q, D - d - 1 + Q)` slices, each `1 / Q` of
    a microbatch: at 8 devices and 4 slices 2.75 microbatches instead of 8.

    Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language
    Model Training", 2024 (arXiv 2406.03488), section 3.

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.
        num_slices: `Q`, at least 1; with 1 the schedule is `one_f_one_b`.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(seq_one_f_one_b(2, 2, num_slices=2))
        0: 0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0
        1: 1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0
    """
    num_devices, num_microbatches, num_slices = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, num_slices=num_slices
    )
    if num_slices == 1:
        return one_f_one_b(num_devices, num_microbatches)
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        forwards, backwards = (
            [Action(device, kind, m, q) for m in range(num_microbatches) for q in slices]
            for kind, slices in (("F", range(num_slices)), ("B", range(num_slices)[::-1]))
        )
        # The first gradient is that of the last slice, which comes behind all the others.
        ahead = min(num_devices - device - 1 + num_slices - 1, len(forwards))
        row = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += (forward, backward)
        rows.append((*row, *backwards[len(forwards) - ahead :]))
    return validate(Schedule(tuple(rows), loop(num_devices), num_microbatches, num_slices))
