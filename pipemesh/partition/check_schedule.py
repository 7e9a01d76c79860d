"""Checks what is said of the schedule: by its name, or by a table's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any, cast

from pipemesh.errors import PartitionError, ScheduleError
from pipemesh.partition.costs import is_sequence, whole
from pipemesh.partition.flights import SCHEDULES, in_flight
from pipemesh.partition.integers import decimal
from pipemesh.partition.options import Options, positive, round_robin
from pipemesh.schedule.names import agreed_stages, parse

_FROM_TABLE = ("in_flight", "stage_devices", "at_once")
_HOW = "from pipemesh.schedule.simulate(table).for_partition()"


def check_schedule(stages: int, asked: Mapping[str, Any]) -> Options:
    """Checks how the stages lie on devices and what they hold.

    Args:
        stages: how many stages there are.
        asked: the keyword arguments of `partition` by name.

    Returns:
        Options of which what belongs to the schedule is set.

    Raises:
        PartitionError: something is wrong, or two things contradict each other.
    """
    microbatches, rounds = asked["num_microbatches"], asked["num_virtual_stages"]
    if microbatches is not None:
        microbatches = whole("num_microbatches", microbatches, 1)
    if rounds is not None:
        rounds = whole("num_virtual_stages", rounds, 1)
    given = [name for name in _FROM_TABLE if asked[name] is not None]
    if not given:
        name, rounds = _by_name(asked["schedule"], rounds)
        _check_multiple(stages, rounds)
        in_flight(name, 1, stages, rounds)
        return Options(
            stages, schedule=name, num_virtual_stages=rounds, num_microbatches=microbatches
        )
    if asked["schedule"] is not None:
        raise PartitionError(
            f"schedule is {asked['schedule']!r} and {given[0]} is given, but both say what the "
            f"stages hold; give the name, or the numbers of a table ({_HOW})"
        )
    placement, rounds = _placement(asked["stage_devices"], stages, rounds)
    counts = asked["in_flight"]
    if counts is not None:
        counts = tuple(
            whole(f"in_flight[{stage}]", count, 0)
            for stage, count in enumerate(_one_a_stage("in_flight", counts, stages))
        )
        if microbatches is not None:
            _check_most("in_flight", counts, microbatches)
    turning = asked["at_once"]
    if turning is not None:
        # With slices of sequences, a share of a microbatch may turn.
        turning = tuple(
            count
            if isinstance(count, Fraction) and count >= 0
            else decimal(positive(f"at_once[{stage}]", count, zero=True))
            for stage, count in enumerate(_one_a_stage("at_once", turning, stages))
        )
        if microbatches is None:
            raise PartitionError("at_once counts microbatches, so it needs num_microbatches")
        _check_most("at_once", turning, microbatches)
    return Options(
        stages,
        schedule=None,
        in_flight=counts,
        at_once=turning,
        placement=placement,
        num_microbatches=microbatches,
        num_virtual_stages=rounds,
    )


def _by_name(schedule: object, rounds: int | None) -> tuple[str, int]:
    """The one name of a schedule, and how many stages a device has under it."""
    if schedule is None:
        rounds = rounds or 1
        return ("one_f_one_b" if rounds == 1 else "interleaved_one_f_one_b"), rounds
    try:
        parsed = parse(schedule)
        rounds = agreed_stages(str(schedule), parsed, rounds)
    except ScheduleError as error:
        raise PartitionError(str(error)) from error
    if parsed.name not in SCHEDULES:
        raise PartitionError(
            f"schedule is {schedule!r}, of which the name alone does not say how many activations "
            f"each stage holds; it may be {', '.join(SCHEDULES)}; for any other give in_flight "
            f"and stage_devices ({_HOW})"
        )
    return parsed.name, parsed.stages() if rounds is None else rounds


def _check_multiple(stages: int, rounds: int) -> None:
    if stages % rounds:
        raise PartitionError(
            f"num_stages is {stages} and num_virtual_stages is {rounds}, but every device owns "
            f"num_virtual_stages of the stages: use {stages // rounds * rounds or rounds} or "
            f"{(stages // rounds + 1) * rounds} stages"
        )


def _one_a_stage(name: str, values: object, stages: int) -> Collection[Any]:
    if not is_sequence(values):
        raise PartitionError(f"{name} is {values!r}, but must be a sequence, one number a stage")
    numbers = cast("Collection[Any]", values)
    if len(numbers) != stages:
        raise PartitionError(
            f"{name} has {len(numbers)} numbers for {stages} stages; give one a stage"
        )
    return numbers


def _check_most(
    name: str, counts: tuple[int, ...] | tuple[Fraction, ...], microbatches: int
) -> None:
    if max(counts) > microbatches:
        raise PartitionError(
            f"{name}[{counts.index(max(counts))}] is {max(counts)}, but num_microbatches is "
            f"{microbatches}, and there are no more of them"
        )


def _placement(
    stage_devices: object, stages: int, rounds: int | None
) -> tuple[tuple[int, ...], int]:
    """For each stage its device, empty if they go round, and the most stages of a device."""
    if stage_devices is None:
        _check_multiple(stages, rounds or 1)
        return (), rounds or 1
    devices = tuple(
        whole(f"stage_devices[{stage}]", device, 0)
        for stage, device in enumerate(_one_a_stage("stage_devices", stage_devices, stages))
    )
    missing = set(range(max(devices))) - set(devices)
    if missing:
        raise PartitionError(
            f"stage_devices names device {max(devices)}, but no stage is on device {min(missing)}; "
            "devices are numbered from 0 without gaps"
        )
    most = max(Counter(devices).values())
    if rounds not in (None, most):
        raise PartitionError(
            f"num_virtual_stages is {rounds}, but stage_devices has {most} stages on a device; "
            "leave num_virtual_stages out"
        )
    if stages % most == 0 and devices == round_robin(stages, most):
        return (), most
    return devices, most
