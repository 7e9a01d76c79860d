"""Checks the options of a partition, by themselves and against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from pipemesh.errors import PartitionError
from pipemesh.partition.check_schedule import check_schedule
from pipemesh.partition.costs import Stack, is_sequence, whole
from pipemesh.partition.memory import REMAT_POLICIES
from pipemesh.partition.options import Options, choice, positive


def check_options(stack: Stack, num_stages: object, asked: Mapping[str, Any]) -> Options:
    """Checks every option by itself and against the others.

    Args:
        stack: the costs.
        num_stages: see `partition`.
        asked: its keyword arguments by name, all but `method`.

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
    placed = check_schedule(stages, asked)
    policy = choice("remat", asked["remat"], REMAT_POLICIES)
    if asked["overlap_transfers"] not in (True, False):
        raise PartitionError(
            f"overlap_transfers is {asked['overlap_transfers']!r}, but must be True or False"
        )
    memory_limit, bandwidth = asked["memory_limit"], asked["bandwidth"]
    if memory_limit is not None:
        memory_limit = positive("memory_limit", memory_limit)
        _need_details(stack, "memory_limit", "parameter_bytes and activation_bytes")
        if placed.schedule is None and placed.in_flight is None:
            raise PartitionError(
                "memory_limit needs in_flight beside stage_devices or at_once: for each stage the "
                "microbatches whose activations it holds"
            )
        if placed.flights() is None:
            raise PartitionError(
                "memory_limit needs num_microbatches: the activations that a stage holds depend "
                "on how many microbatches are in flight"
            )
    if bandwidth is not None:
        bandwidth = positive("bandwidth", bandwidth)
        _need_details(stack, "bandwidth", "boundary_bytes")
    elif asked["overlap_transfers"]:
        raise PartitionError(
            "overlap_transfers is set, but without bandwidth there are no transfers; give bandwidth"
        )
    if policy != "none":
        _need_details(stack, f"remat={policy!r}", "forward")
    if policy == "except_last" and placed.schedule is None and placed.at_once is None:
        raise PartitionError(
            "remat='except_last' needs at_once beside in_flight or stage_devices: for each stage "
            "the microbatches whose backward pass follows their forward pass at once"
        )
    speeds, devices = asked["speeds"], placed.num_devices
    if speeds is not None:
        if not is_sequence(speeds):
            raise PartitionError(
                f"speeds is {speeds!r}, but must be a sequence, one number a device"
            )
        speeds = tuple(positive(f"speeds[{device}]", speed) for device, speed in enumerate(speeds))
        if len(speeds) != devices:
            raise PartitionError(
                f"speeds has {len(speeds)} numbers for {devices} devices; give one a device, in "
                "the order of the stages"
            )
    least = whole("min_layers", asked["min_layers"], 1)
    most = asked["max_layers"]
    most = None if most is None else whole("max_layers", most, 1)
    _check_counts(layers, stages, least, most)
    groups = _groups(asked["same_stage"], layers)
    places, pinned = _fixed(asked["fixed"], layers, stages)
    _check_fixed_outside_groups((*places, *(place for _, place in pinned)), groups)
    return dataclasses.replace(
        placed,
        speeds=speeds,
        bandwidth=bandwidth,
        overlap_transfers=bool(asked["overlap_transfers"]),
        memory_limit=memory_limit,
        optimizer_bytes_per_parameter_byte=positive(
            "optimizer_bytes_per_parameter_byte",
            asked["optimizer_bytes_per_parameter_byte"],
            zero=True,
        ),
        remat=policy,
        same_stage=groups,
        min_layers=least,
        max_layers=most,
        fixed=places,
        pinned=pinned,
    )


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
    if not is_sequence(same_stage):
        raise PartitionError(
            f"same_stage is {same_stage!r}, but must be a sequence of groups such as [[0, 3]]"
        )
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
        first_layers = cast("Mapping[int, int]", fixed)
        for stage in sorted(whole("a stage in fixed", stage, 1) for stage in first_layers):
            layer = first_layers[stage]
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
    if not isinstance(fixed, Collection) or isinstance(fixed, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PartitionError(
            f"fixed is {fixed!r}, but must be layers such as [4, 8], or a mapping such as {{1: 4}}"
        )
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
