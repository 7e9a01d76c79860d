"""What schedules are known to hold, by name: microbatches in flight, and who turns around at once.

Formulas, so that a name alone is enough at any size and without a table. Of any other schedule, and
of these too, `pipemesh.schedule.simulate(table).for_partition()` says the same, action by action.
"""

from __future__ import annotations

from fractions import Fraction

from pipemesh.errors import PartitionError
from pipemesh.partition.costs import whole

SCHEDULES = (
    "gpipe",
    "one_f_one_b",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "zb_h1",
)
"""Schedules whose activations in flight are known here; the names of `pipemesh.schedule`."""

_LATE = ("gpipe", "looped_bfs")


def in_flight(
    schedule: str, num_microbatches: int, num_stages: int, num_virtual_stages: int = 1
) -> tuple[int, ...]:
    """Counts the microbatches whose activations each stage holds at its peak.

    * `gpipe` and `looped_bfs` run all forward passes first: every stage holds all M.
    * `one_f_one_b`: stage s of S holds min(M, S - s); the last one turns around at once.
    * `zb_h1` moves weight gradients into the bubble, which keeps activations longer on late
      stages, until all stages hold as many as the first one: min(M, S).
    * `interleaved_one_f_one_b` on D devices with V stages each: device d runs
      min(M V, 2 (D - d - 1) + (V - 1) D + 1) forward actions ahead of its first backward action;
      each stage's own peak is counted by walking through the device's actions.

    Args:
        schedule: one of `SCHEDULES`.
        num_microbatches: M, one or more.
        num_stages: S, all stages, so D = S / V devices.
        num_virtual_stages: V, the stages of each device.

    Returns:
        For each stage, the number of microbatches.

    Raises:
        PartitionError: a number is none or below 1, or the schedule is not known or does not fit
            the number of virtual stages.

    Example:
        >>> in_flight("one_f_one_b", num_microbatches=3, num_stages=4)
        (3, 3, 2, 1)
    """
    stages = whole("num_stages", num_stages, 1)
    microbatches = whole("num_microbatches", num_microbatches, 1)
    whole("num_virtual_stages", num_virtual_stages, 1)
    if schedule not in SCHEDULES:
        raise PartitionError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    if num_virtual_stages > 1 and schedule in ("one_f_one_b", "zb_h1"):
        raise PartitionError(
            f"schedule {schedule!r} runs one stage on each device, but num_virtual_stages is "
            f"{num_virtual_stages}; use schedule 'interleaved_one_f_one_b' or 'looped_bfs', or "
            "num_virtual_stages=1"
        )
    if schedule in _LATE:
        return (microbatches,) * stages
    if schedule == "zb_h1":
        return (min(microbatches, stages),) * stages
    if num_virtual_stages == 1:
        return tuple(min(microbatches, stages - stage) for stage in range(stages))
    devices = stages // num_virtual_stages
    counts = [0] * stages
    for device in range(devices):
        peaks = _interleaved_peaks(device, devices, num_virtual_stages, microbatches)
        for round_, peak in enumerate(peaks):
            counts[round_ * devices + device] = peak
    return tuple(counts)


def _interleaved_peaks(device: int, devices: int, rounds: int, microbatches: int) -> list[int]:
    """The peak of each stage of one device, walking through its actions."""
    # Groups of as many microbatches as devices go through all rounds before the next group.
    forward = [
        round_
        for begin in range(0, microbatches, devices)
        for round_ in range(rounds)
        for _ in range(min(devices, microbatches - begin))
    ]
    backward = [rounds - 1 - round_ for round_ in forward]
    warm_up = min(len(forward), 2 * (devices - device - 1) + (rounds - 1) * devices + 1)
    held, peaks = [0] * rounds, [0] * rounds
    for action, round_ in enumerate(forward):
        held[round_] += 1
        peaks[round_] = max(peaks[round_], held[round_])
        if action + 1 >= warm_up:
            held[backward[action + 1 - warm_up]] -= 1
    return peaks


def at_once(
    schedule: str, num_microbatches: int | None, num_stages: int, num_virtual_stages: int = 1
) -> tuple[Fraction, ...]:
    """The share of microbatches whose backward pass follows their forward pass at once.

    That is the last microbatch in the last stage of every device where all forward passes come
    first, and every microbatch in the very last stage elsewhere. A single microbatch turns around
    wherever nothing else is between.

    Args:
        schedule: one of `SCHEDULES`.
        num_microbatches: M, or `None` if not known (then large).
        num_stages: S.
        num_virtual_stages: V.

    Returns:
        For each stage, a share from 0 to 1.

    Example:
        >>> [str(share) for share in at_once("gpipe", num_microbatches=4, num_stages=2)]
        ['1/4', '1/4']
    """
    last = num_stages // num_virtual_stages if schedule in _LATE or num_microbatches == 1 else 1
    share = Fraction(1)
    if schedule in _LATE:
        share = Fraction(0) if num_microbatches is None else Fraction(1, num_microbatches)
    return (Fraction(0),) * (num_stages - last) + (share,) * last
