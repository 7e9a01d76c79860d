"""The options of a partition, checked by themselves and against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from pipemesh.errors import PartitionError, ScheduleError
from pipemesh.partition.costs import Stack, number_problem
from pipemesh.partition.memory import (
    REMAT_POLICIES,
    SCHEDULES,
    in_flight,
)
from pipemesh.schedule_names import agreed_stages, parse
from pipemesh.text import nearest

METHODS = ("exact", "lingvo", "uniform")

CONSTRAINTS = ("memory_limit", "same_stage", "fixed", "min_layers", "max_layers")
"""Options that forbid cuts."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asks for; the fields are the arguments of `partition`, described there."""

    num_stages: int
    speeds: tuple[float, ...] | None = None
    bandwidth: float | None = None
    overlap_transfers: bool = False
    memory_limit: float | None = None
    schedule: str = "one_f_one_b"
    num_microbatches: int | None = None
    optimizer_bytes_per_parameter_byte: float = 2.0
    remat: str = "none"
    num_virtual_stages: int = 1
    same_stage: tuple[tuple[int, ...], ...] = ()
    min_layers: int = 1
    max_layers: int | None = None
    fixed: tuple[int, ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices the stages run on."""
        return self.num_stages // self.num_virtual_stages

    def without(self, constraint: str) -> Options:
        """Drops one constraint.

        Args:
            constraint: one of `CONSTRAINTS`, or `"bandwidth"`.

        Returns:
            Options that allow more cuts.
        """
        if constraint == "fixed":
            return dataclasses.replace(self, fixed=(), pinned=())
        free: dict[str, Any] = {"same_stage": (), "min_layers": 1}
        return dataclasses.replace(self, **{constraint: free.get(constraint)})

    def active(self) -> tuple[str, ...]:
        """The constraints that were given.

        Returns:
            Names out of `CONSTRAINTS`.
        """
        given = {
            "memory_limit": self.memory_limit is not None,
            "same_stage": bool(self.same_stage),
            "fixed": bool(self.fixed or self.pinned),
            "min_layers": self.min_layers > 1,
            "max_layers": self.max_layers is not None,
        }
        return tuple(name for name in CONSTRAINTS if given[name])


def choice(name: str, value: object, known: Sequence[str]) -> str:
    """Checks a word.

    Args:
        name: of the option.
        value: what was given.
        known: what is allowed.

    Returns:
        The word.

    Raises:
        PartitionError: it is not allowed; the message suggests the nearest word.
    """
    if isinstance(value, str) and value in known:
        return value
    near = nearest(str(value), known)
    hint = f"; did you mean {near!r}?" if near else ""
    raise PartitionError(f"{name} is {value!r}, but must be one of {', '.join(known)}{hint}")


def whole(name: str, value: object, least: int) -> int:
    """Checks a whole number.

    Args:
        name: of the option.
        value: what was given.
        least: the smallest number allowed.

    Returns:
        The number.

    Raises:
        PartitionError: it is no whole number or too small.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise PartitionError(f"{name} is {value!r}, but must be a whole number, {least} or more")
    number = int(cast("int", value))
    if number < least:
        raise PartitionError(f"{name} is {number}, but must be {least} or more")
    return number


def positive(name: str, value: object, zero: bool = False) -> float:
    """Checks a number above zero.

    Args:
        name: of the option.
        value: what was given.
        zero: whether zero is allowed too.

    Returns:
        The number.

    Raises:
        PartitionError: it is no finite number or not above zero.
    """
    if number_problem(value) or (not zero and float(value) == 0):  # type: ignore[arg-type]
        bound = "zero or more" if zero else "above zero"
        raise PartitionError(f"{name} is {value!r}, but must be a finite number {bound}")
    return float(value)  # type: ignore[arg-type]


def check_options(
    stack: Stack,
    num_stages: object,
    *,
    speeds: Sequence[float] | None,
    bandwidth: float | None,
    overlap_transfers: bool,
    memory_limit: float | None,
    schedule: str | None,
    num_microbatches: int | None,
    optimizer_bytes_per_parameter_byte: float,
    remat: str,
    num_virtual_stages: int | None,
    same_stage: Sequence[Collection[int]],
    min_layers: int,
    max_layers: int | None,
    fixed: Collection[int] | Mapping[int, int],
) -> Options:
    """Checks every option by itself and against the others.

    Args:
        stack: the costs.
        num_stages: see `partition`, like all that follow.
        speeds: see there.
        bandwidth: see there.
        overlap_transfers: see there.
        memory_limit: see there.
        schedule: see there.
        num_microbatches: see there.
        optimizer_bytes_per_parameter_byte: see there.
        remat: see there.
        num_virtual_stages: see there.
        same_stage: see there.
        min_layers: see there.
        max_layers: see there.
        fixed: see there.

    Returns:
        The options.

    Raises:
        PartitionError: one of them is wrong, or two contradict each other.
    """
    layers = stack.num_layers
    stages = whole("num_stages", num_stages, 1)
    if stages > layers:
        raise PartitionError(
            f"num_stages is {stages}, but {layers} layers allow 1 to {layers} stages: "
            "every stage needs a layer of its own"
        )
    if num_virtual_stages is not None:
        num_virtual_stages = whole("num_virtual_stages", num_virtual_stages, 1)
    schedule, rounds = _schedule(schedule, num_virtual_stages)
    if stages % rounds:
        raise PartitionError(
            f"num_stages is {stages} and num_virtual_stages is {rounds}, but every device owns "
            f"num_virtual_stages of the stages: use {stages // rounds * rounds or rounds} or "
            f"{(stages // rounds + 1) * rounds} stages"
        )
    devices = stages // rounds
    policy = choice("remat", remat, REMAT_POLICIES)
    in_flight(schedule, 1, stages, rounds)
    if num_microbatches is not None:
        num_microbatches = whole("num_microbatches", num_microbatches, 1)
    if memory_limit is not None:
        memory_limit = positive("memory_limit", memory_limit)
        _need_details(stack, "memory_limit", "parameter_bytes and activation_bytes")
        if num_microbatches is None:
            raise PartitionError(
                "memory_limit needs num_microbatches: the activations that a stage holds depend "
                "on how many microbatches are in flight"
            )
    if bandwidth is not None:
        bandwidth = positive("bandwidth", bandwidth)
        _need_details(stack, "bandwidth", "boundary_bytes")
    elif overlap_transfers:
        raise PartitionError(
            "overlap_transfers is set, but without bandwidth there are no transfers; give bandwidth"
        )
    if policy != "none":
        _need_details(stack, f"remat={policy!r}", "forward")
    if speeds is not None:
        speeds = tuple(positive(f"speeds[{device}]", speed) for device, speed in enumerate(speeds))
        if len(speeds) != devices:
            raise PartitionError(
                f"speeds has {len(speeds)} numbers for {devices} devices; give one a device, in "
                "the order of the stages"
            )
    least = whole("min_layers", min_layers, 1)
    most = None if max_layers is None else whole("max_layers", max_layers, 1)
    _check_counts(layers, stages, least, most)
    groups = _groups(same_stage, layers)
    places, pinned = _fixed(fixed, layers, stages)
    _check_fixed_outside_groups((*places, *(place for _, place in pinned)), groups)
    return Options(
        num_stages=stages,
        speeds=speeds,
        bandwidth=bandwidth,
        overlap_transfers=bool(overlap_transfers),
        memory_limit=memory_limit,
        schedule=schedule,
        num_microbatches=num_microbatches,
        optimizer_bytes_per_parameter_byte=positive(
            "optimizer_bytes_per_parameter_byte", optimizer_bytes_per_parameter_byte, zero=True
        ),
        remat=policy,
        num_virtual_stages=rounds,
        same_stage=groups,
        min_layers=least,
        max_layers=most,
        fixed=places,
        pinned=pinned,
    )


def _schedule(schedule: object, num_virtual_stages: int | None) -> tuple[str, int]:
    """The one name of a schedule, and how many stages a device has under it."""
    if schedule is None:
        rounds = num_virtual_stages or 1
        return ("one_f_one_b" if rounds == 1 else "interleaved_one_f_one_b"), rounds
    try:
        parsed = parse(schedule)
        rounds = agreed_stages(str(schedule), parsed, num_virtual_stages)
    except ScheduleError as error:
        raise PartitionError(str(error)) from error
    if parsed.name not in SCHEDULES:
        raise PartitionError(
            f"schedule is {schedule!r}, of which the partitioner does not know how many "
            f"activations each stage holds; it may be {', '.join(SCHEDULES)}"
        )
    return parsed.name, parsed.stages() if rounds is None else rounds


def _need_details(stack: Stack, option: str, fields: str) -> None:
    if not stack.detailed:
        raise PartitionError(
            f"{option} needs costs that say {fields}; give LayerCost objects (in a file: columns "
            "of those names) instead of plain numbers"
        )


def _check_counts(layers: int, stages: int, least: int, most: int | None) -> None:
    if least * stages > layers:
        raise PartitionError(
            f"min_layers is {least}, but {stages} stages of {least} layers need "
            f"{least * stages} layers and there are {layers}; use min_layers={layers // stages} "
            f"or {layers // least} stages"
        )
    if most is not None and most < least:
        raise PartitionError(f"max_layers is {most}, but min_layers is {least}; swap them?")
    if most is not None and most * stages < layers:
        raise PartitionError(
            f"max_layers is {most}, but {stages} stages of {most} layers hold only "
            f"{most * stages} of the {layers} layers; use max_layers={-(-layers // stages)} or "
            f"{-(-layers // most)} stages"
        )


def _groups(same_stage: Sequence[Collection[int]], layers: int) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    for index, group in enumerate(same_stage):
        name = f"same_stage[{index}]"
        if not isinstance(group, Collection) or isinstance(group, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PartitionError(
                f"{name} is {group!r}, but must be a group of layer indices such as [0, 3]"
            )
        members = sorted(whole(f"an index in {name}", layer, 0) for layer in group)
        if len(members) < 2 or members[-1] >= layers:
            raise PartitionError(
                f"{name} is {members}, but must hold two or more layer indices from 0 to "
                f"{layers - 1}"
            )
        groups.append(tuple(members))
    return tuple(groups)


def _fixed(
    fixed: Collection[int] | Mapping[int, int], layers: int, stages: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    if isinstance(fixed, Mapping):
        pinned: list[tuple[int, int]] = []
        for stage, layer in sorted(cast("Mapping[int, int]", fixed).items()):
            stage = whole("a stage in fixed", stage, 1)
            layer = whole(f"the first layer of stage {stage} in fixed", layer, 1)
            if stage >= stages or layer >= layers:
                raise PartitionError(
                    f"fixed says that stage {stage} begins at layer {layer}, but stages go from 1 "
                    f"to {stages - 1} there and layers from 1 to {layers - 1}"
                )
            before_stage, before_layer = pinned[-1] if pinned else (0, 0)
            if layer - before_layer < stage - before_stage:
                raise PartitionError(
                    f"fixed leaves {max(layer - before_layer, 0)} layers for the "
                    f"{stage - before_stage} stages between layer {before_layer} and layer "
                    f"{layer}; every stage needs a layer of its own"
                )
            pinned.append((stage, layer))
        if pinned and layers - pinned[-1][1] < stages - pinned[-1][0]:
            raise PartitionError(
                f"fixed leaves {layers - pinned[-1][1]} layers for the last "
                f"{stages - pinned[-1][0]} stages; every stage needs a layer of its own"
            )
        return (), tuple(pinned)
    places = sorted({whole("a layer in fixed", layer, 1) for layer in fixed})
    if places and places[-1] >= layers:
        raise PartitionError(
            f"fixed says that a stage begins at layer {places[-1]}, but that must be a layer from "
            f"1 to {layers - 1}"
        )
    if len(places) > stages - 1:
        raise PartitionError(
            f"fixed names {len(places)} boundaries, but {stages} stages have {stages - 1}; name "
            f"fewer or use {len(places) + 1} stages"
        )
    return tuple(places), ()


def _check_fixed_outside_groups(places: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
    for group in groups:
        inside = [place for place in places if group[0] < place <= group[-1]]
        if inside:
            raise PartitionError(
                f"fixed begins a stage at layer {inside[0]}, but same_stage keeps the layers "
                f"{group[0]} to {group[-1]} together; drop one of the two"
            )
