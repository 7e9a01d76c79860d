"""The options of a partition: their values, and every check of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from pipemesh.errors import PartitionError, ScheduleError
from pipemesh.partition.costs import Stack, decimal, is_sequence, number_problem, whole
from pipemesh.partition.memory import REMAT_POLICIES, WITH_FORMULA, at_once, in_flight
from pipemesh.text import nearest

if TYPE_CHECKING:
    from pipemesh.schedule import Schedule

METHODS = ("exact", "lingvo", "uniform")

CONSTRAINTS = {
    "memory_limit": None,
    "same_stage": (),
    "fixed": (),
    "min_layers": 1,
    "max_layers": None,
}
"""Options that forbid cuts, with the value that forbids none; `pinned` belongs to `fixed`."""

_FROM_TABLE = ("in_flight", "stage_devices", "at_once")


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments of `partition`, which describes them."""

    num_stages: int
    speeds: tuple[float, ...] | None = None
    bandwidth: float | None = None
    overlap_transfers: bool = False
    memory_limit: float | None = None
    schedule: str | None = "one_f_one_b"
    in_flight: tuple[int, ...] | None = None
    at_once: tuple[Fraction, ...] | None = None
    placement: tuple[int, ...] = ()
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
        """The number of devices that the stages run on."""
        return max(self.stage_devices) + 1

    @property
    def stage_devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.placement or round_robin(self.num_stages, self.num_virtual_stages)

    def microbatches_in_flight(self) -> tuple[int, ...] | None:
        """Returns the microbatches in flight on each stage, or `None` if they are not known."""
        if self.in_flight is not None or self.schedule is None or self.num_microbatches is None:
            return self.in_flight
        return in_flight(
            self.schedule, self.num_microbatches, self.num_stages, self.num_virtual_stages
        )

    def recomputed(self) -> tuple[Fraction, ...]:
        """Returns the share of forward passes that each stage runs a second time."""
        if self.remat == "none":
            return (Fraction(0),) * self.num_stages
        if self.remat == "full":
            return (Fraction(1),) * self.num_stages
        if self.at_once is not None:
            assert self.num_microbatches is not None
            return tuple(1 - count / self.num_microbatches for count in self.at_once)
        assert self.schedule is not None
        shares = at_once(
            self.schedule, self.num_microbatches, self.num_stages, self.num_virtual_stages
        )
        return tuple(1 - share for share in shares)

    def without(self, constraint: str) -> Options:
        """Returns the options without one of `CONSTRAINTS`, or without `"bandwidth"`."""
        changed: dict[str, Any] = {constraint: CONSTRAINTS.get(constraint)}
        if constraint == "fixed":
            changed["pinned"] = ()
        return dataclasses.replace(self, **changed)

    def active(self) -> tuple[str, ...]:
        """Returns those of `CONSTRAINTS` that were given."""
        return tuple(
            name
            for name, free in CONSTRAINTS.items()
            if getattr(self, name) != free or (name == "fixed" and self.pinned)
        )


def round_robin(num_stages: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Returns the device of each stage where stages go round the devices: `0, 1, 2, 0, 1, 2`."""
    return tuple(range(num_stages // num_virtual_stages)) * num_virtual_stages


def choice(name: str, value: object, known: Sequence[str]) -> str:
    """Returns a word out of `known`; otherwise raises an error that suggests the nearest one."""
    if isinstance(value, str) and value in known:
        return value
    near = nearest(str(value), known)
    hint = f"; did you mean {near!r}?" if near else ""
    raise PartitionError(f"{name} is {value!r}, but must be one of {', '.join(known)}{hint}")


def positive(name: str, value: object, zero: bool = False) -> float:
    """Returns a number above zero, or with `zero` at least zero; otherwise raises an error."""
    if number_problem(value) or (not zero and float(value) == 0):  # type: ignore[arg-type]
        bound = "zero or more" if zero else "above zero"
        raise PartitionError(f"{name} is {value!r}, but must be a finite number {bound}")
    return float(value)  # type: ignore[arg-type]


def check_options(stack: Stack, num_stages: object, arguments: Mapping[str, Any]) -> Options:
    """Checks the keyword arguments of `partition`, each alone and against the others."""
    layers = stack.num_layers
    stages = whole("num_stages", num_stages, 1)
    if stages > layers:
        raise PartitionError(
            f"num_stages is {stages}, but {layers} layers allow 1 to {layers} stages: "
            "every stage needs at least one layer"
        )
    options = check_schedule(stages, arguments)
    policy = choice("remat", arguments["remat"], REMAT_POLICIES)
    overlap_transfers = arguments["overlap_transfers"]
    if overlap_transfers not in (True, False):
        raise PartitionError(
            f"overlap_transfers is {overlap_transfers!r}, but must be True or False"
        )
    memory_limit, bandwidth = arguments["memory_limit"], arguments["bandwidth"]
    if memory_limit is not None:
        memory_limit = positive("memory_limit", memory_limit)
        _check_details(stack, "memory_limit", "parameter_bytes and activation_bytes")
        if options.schedule is None and options.in_flight is None:
            raise PartitionError(
                "memory_limit needs in_flight beside stage_devices or at_once: for each stage, the "
                "microbatches whose activations it holds"
            )
        if options.microbatches_in_flight() is None:
            raise PartitionError(
                "memory_limit needs num_microbatches: the activations that a stage holds depend "
                "on the number of microbatches in flight"
            )
    if bandwidth is not None:
        bandwidth = positive("bandwidth", bandwidth)
        _check_details(stack, "bandwidth", "boundary_bytes")
    elif overlap_transfers:
        raise PartitionError(
            "overlap_transfers is set, but without bandwidth there are no transfers; give bandwidth"
        )
    if policy != "none":
        _check_details(stack, f"remat={policy!r}", "forward")
    if policy == "except_last" and options.schedule is None and options.at_once is None:
        raise PartitionError(
            "remat='except_last' needs at_once beside in_flight or stage_devices: for each stage, "
            "the microbatches whose backward pass directly follows their forward pass"
        )
    min_layers = whole("min_layers", arguments["min_layers"], 1)
    max_layers = arguments["max_layers"]
    max_layers = None if max_layers is None else whole("max_layers", max_layers, 1)
    _check_counts(layers, stages, min_layers, max_layers)
    groups = _same_stage(arguments["same_stage"], layers)
    fixed, pinned = _fixed(arguments["fixed"], layers, stages)
    _check_fixed_outside_groups((*fixed, *(layer for _, layer in pinned)), groups)
    speeds = arguments["speeds"]
    if speeds is not None:
        speeds = tuple(
            positive(f"speeds[{device}]", speed)
            for device, speed in enumerate(
                _one_each("speeds", speeds, options.num_devices, "device")
            )
        )
    return dataclasses.replace(
        options,
        speeds=speeds,
        bandwidth=bandwidth,
        overlap_transfers=bool(overlap_transfers),
        memory_limit=memory_limit,
        optimizer_bytes_per_parameter_byte=positive(
            "optimizer_bytes_per_parameter_byte",
            arguments["optimizer_bytes_per_parameter_byte"],
            zero=True,
        ),
        remat=policy,
        same_stage=groups,
        min_layers=min_layers,
        max_layers=max_layers,
        fixed=fixed,
        pinned=pinned,
    )


def check_schedule(stages: int, arguments: Mapping[str, Any]) -> Options:
    """Checks the arguments that say what the stages hold: a schedule, or the numbers of one."""
    microbatches, rounds = arguments["num_microbatches"], arguments["num_virtual_stages"]
    if microbatches is not None:
        microbatches = whole("num_microbatches", microbatches, 1)
    if rounds is not None:
        rounds = whole("num_virtual_stages", rounds, 1)
    schedule = arguments["schedule"]
    numbers = [name for name in _FROM_TABLE if arguments[name] is not None]
    if numbers and schedule is not None:
        raise PartitionError(
            f"schedule and {numbers[0]} are given, but both say what the stages hold; give one of "
            "them"
        )
    simulated = {} if schedule is None else _simulated(schedule, stages, microbatches)
    if simulated:
        arguments = {**arguments, **simulated}
        microbatches = simulated["num_microbatches"]
    elif not numbers:
        name, rounds = _named_schedule(schedule, rounds)
        _check_multiple(stages, rounds)
        # Raises an error if the schedule does not allow so many virtual stages.
        in_flight(name, 1, stages, rounds)
        return Options(
            stages, schedule=name, num_virtual_stages=rounds, num_microbatches=microbatches
        )
    placement, rounds = _placement(arguments["stage_devices"], stages, rounds)
    held = arguments["in_flight"]
    if held is not None:
        held = tuple(
            whole(f"in_flight[{stage}]", count, 0)
            for stage, count in enumerate(_one_each("in_flight", held, stages))
        )
        if microbatches is not None:
            _check_at_most("in_flight", held, microbatches)
    turning = arguments["at_once"]
    if turning is not None:
        # With sequence slices, a fraction of a microbatch may turn around.
        turning = tuple(
            count
            if isinstance(count, Fraction) and count >= 0
            else decimal(positive(f"at_once[{stage}]", count, zero=True))
            for stage, count in enumerate(_one_each("at_once", turning, stages))
        )
        if microbatches is None:
            raise PartitionError("at_once counts microbatches; give num_microbatches too")
        _check_at_most("at_once", turning, microbatches)
    return Options(
        stages,
        schedule=None,
        in_flight=held,
        at_once=turning,
        placement=placement,
        num_microbatches=microbatches,
        num_virtual_stages=rounds,
    )


@functools.lru_cache(maxsize=8)
def _facts(schedule: Schedule) -> dict[str, Any]:
    from pipemesh.schedule import simulate

    return simulate(schedule).for_partition()


def _simulated(schedule: object, stages: int, microbatches: int | None) -> dict[str, Any]:
    """Returns the numbers of a schedule's table; none for a name that has a formula."""
    # Only now: to load schedules takes longer than all that a partition without one needs.
    from pipemesh.schedule import Schedule, ScheduleSpec
    from pipemesh.schedule.names import parse

    try:
        if not isinstance(schedule, Schedule):
            if parse(schedule).name in WITH_FORMULA:
                return {}
            spec = ScheduleSpec.from_text(str(schedule))
            if microbatches is None:
                raise PartitionError(
                    f"schedule {schedule!r} is simulated to count what its stages hold; give "
                    "num_microbatches"
                )
            schedule = spec.for_stages(stages, microbatches)
        if schedule.num_stages != stages:
            raise PartitionError(
                f"the schedule has {schedule.num_stages} stages, but num_stages is {stages}; make "
                "them equal"
            )
        if microbatches not in (None, schedule.num_microbatches):
            raise PartitionError(
                f"the schedule has {schedule.num_microbatches} microbatches, but num_microbatches "
                f"is {microbatches}; leave it out"
            )
        return _facts(schedule)
    except ScheduleError as error:
        raise PartitionError(str(error)) from error


def _named_schedule(schedule: object, rounds: int | None) -> tuple[str, int]:
    """Returns the full name of a schedule and the number of stages that a device has under it."""
    if schedule is None:
        rounds = rounds or 1
        return ("one_f_one_b" if rounds == 1 else "interleaved_one_f_one_b"), rounds
    from pipemesh.schedule.names import agreed_stages, parse

    parsed = parse(schedule)
    try:
        rounds = agreed_stages(str(schedule), parsed, rounds)
    except ScheduleError as error:
        raise PartitionError(str(error)) from error
    return parsed.name, parsed.stages() if rounds is None else rounds


def _check_multiple(stages: int, rounds: int) -> None:
    if stages % rounds:
        raise PartitionError(
            f"num_stages is {stages} and num_virtual_stages is {rounds}, but every device owns "
            f"num_virtual_stages of the stages; use {stages // rounds * rounds or rounds} or "
            f"{(stages // rounds + 1) * rounds} stages"
        )


def _one_each(name: str, values: object, number: int, item: str = "stage") -> Collection[Any]:
    if not is_sequence(values):
        raise PartitionError(f"{name} is {values!r}, but must be a sequence, one number a {item}")
    numbers = cast("Collection[Any]", values)
    if len(numbers) != number:
        raise PartitionError(
            f"{name} has {len(numbers)} numbers for {number} {item}s; give one a {item}, in order"
        )
    return numbers


def _check_at_most(
    name: str, counts: tuple[int, ...] | tuple[Fraction, ...], microbatches: int
) -> None:
    if max(counts) > microbatches:
        raise PartitionError(
            f"{name}[{counts.index(max(counts))}] is {max(counts)}, but num_microbatches is "
            f"{microbatches}; give at most that"
        )


def _placement(
    stage_devices: object, stages: int, rounds: int | None
) -> tuple[tuple[int, ...], int]:
    """Returns the device of each stage (empty if they go round) and the most stages of a device."""
    if stage_devices is None:
        _check_multiple(stages, rounds or 1)
        return (), rounds or 1
    devices = tuple(
        whole(f"stage_devices[{stage}]", device, 0)
        for stage, device in enumerate(_one_each("stage_devices", stage_devices, stages))
    )
    missing = set(range(max(devices))) - set(devices)
    if missing:
        raise PartitionError(
            f"stage_devices names device {max(devices)}, but no stage is on device {min(missing)}; "
            "number the devices from 0 without gaps"
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


def _check_details(stack: Stack, option: str, fields: str) -> None:
    if not stack.detailed:
        raise PartitionError(
            f"{option} needs costs with {fields}, but they are plain numbers; give LayerCost "
            "objects (in a file: columns of those names)"
        )


def _check_counts(layers: int, stages: int, min_layers: int, max_layers: int | None) -> None:
    if min_layers * stages > layers:
        raise PartitionError(
            f"min_layers is {min_layers}, but {stages} stages of {min_layers} layers need "
            f"{min_layers * stages} layers and there are {layers}; use "
            f"min_layers={layers // stages} or {layers // min_layers} stages"
        )
    if max_layers is not None and max_layers < min_layers:
        raise PartitionError(
            f"max_layers is {max_layers}, but min_layers is {min_layers}; swap them?"
        )
    if max_layers is not None and max_layers * stages < layers:
        raise PartitionError(
            f"max_layers is {max_layers}, but {stages} stages of {max_layers} layers hold only "
            f"{max_layers * stages} of the {layers} layers; use max_layers={-(-layers // stages)} "
            f"or {-(-layers // max_layers)} stages"
        )


def _same_stage(same_stage: Sequence[Collection[int]], layers: int) -> tuple[tuple[int, ...], ...]:
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
    """Returns the layers at which some stage begins, and pairs of a stage and its first layer."""
    if isinstance(fixed, Mapping):
        return (), _pinned(cast("Mapping[int, int]", fixed), layers, stages)
    if not isinstance(fixed, Collection) or isinstance(fixed, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PartitionError(
            f"fixed is {fixed!r}, but must be layers such as [4, 8], or a mapping from stage to "
            "first layer such as {1: 4}"
        )
    first_layers = sorted({whole("a layer in fixed", layer, 1) for layer in fixed})
    if first_layers and first_layers[-1] >= layers:
        raise PartitionError(
            f"fixed lets a stage begin at layer {first_layers[-1]}, but that must be a layer from "
            f"1 to {layers - 1}"
        )
    if len(first_layers) > stages - 1:
        raise PartitionError(
            f"fixed names {len(first_layers)} boundaries, but {stages} stages have {stages - 1}; "
            f"name fewer or use {len(first_layers) + 1} stages"
        )
    return tuple(first_layers), ()


def _pinned(
    first_layers: Mapping[int, int], layers: int, stages: int
) -> tuple[tuple[int, int], ...]:
    pinned: list[tuple[int, int]] = []
    for stage in sorted(whole("a stage in fixed", stage, 1) for stage in first_layers):
        layer = whole(f"the first layer of stage {stage} in fixed", first_layers[stage], 1)
        if stage >= stages or layer >= layers:
            raise PartitionError(
                f"fixed lets stage {stage} begin at layer {layer}, but its stages must be from 1 "
                f"to {stages - 1} and its layers from 1 to {layers - 1}"
            )
        before_stage, before_layer = pinned[-1] if pinned else (0, 0)
        if layer - before_layer < stage - before_stage:
            raise PartitionError(
                f"fixed leaves {max(layer - before_layer, 0)} layers for the "
                f"{stage - before_stage} stages between layer {before_layer} and layer "
                f"{layer}; every stage needs at least one layer"
            )
        pinned.append((stage, layer))
    if pinned and layers - pinned[-1][1] < stages - pinned[-1][0]:
        raise PartitionError(
            f"fixed leaves {layers - pinned[-1][1]} layers for the last "
            f"{stages - pinned[-1][0]} stages; every stage needs at least one layer"
        )
    return tuple(pinned)


def _check_fixed_outside_groups(layers: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
    for group in groups:
        inside = [layer for layer in layers if group[0] < layer <= group[-1]]
        if inside:
            raise PartitionError(
                f"fixed begins a stage at layer {inside[0]}, but same_stage keeps the layers "
                f"{group[0]} to {group[-1]} together; drop one of the two"
            )
