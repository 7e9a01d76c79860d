"""Durations of actions and transfers, as values and as one word on a command line."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

from pipemesh.errors import ScheduleError
from pipemesh.schedule.checks import check_counts, check_name, short

Cost = float | Sequence[float]
"""One number for every stage, or one number a stage."""
FIELD_OF = {
    "F": "forward",
    "B": "backward",
    "I": "input_grad",
    "W": "weight_grad",
    "R": "recompute",
}
"""The field of `Costs` with the duration of each kind of action."""
_Values = float | tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Durations of actions and of what links do beside them, in any one unit of time.

    Each is one number for every stage or one number a stage (any sequence, also an array; kept
    as a tuple). What is left out follows from what is given: `forward` is 1; `backward` is the
    sum of `input_grad` and `weight_grad`; these are half of `backward` each, or the rest of it
    if one of them is given; if all three are left out, they are 2, 1 and 1 times `forward`;
    `recompute` is `forward`.

    Attributes:
        forward: duration of an `F`.
        backward: duration of a `B`.
        input_grad: duration of an `I`.
        weight_grad: duration of a `W`.
        transfer: time from the end of an action until its result can be used on another device.
            `transfer[s]` is for the boundary between stages `s` and `s + 1`, for activations
            one way and gradients the other; the last stage's entry is not used. Transfers cost
            nothing within a device and keep no device busy.
        recompute: duration of an `R`. A backward that recomputes by itself, in a schedule without
            `R`, has it in its own duration.
        gradient_sum: time of the sum of a stage's gradients over its replicas. It begins when the
            stage's last `B` or `W` has ended, and keeps the link of its device busy, not the device
            (`Timeline.sums`).
        all_gather: time in which a device fetches the weights of a stage that are cut over its
            replicas, over its link (`Timeline.fetches`). A device with one stage fetches once, at
            time 0. With several stages it fetches for each action but `W`, as soon as it is free.
            The action waits. `optimal_schedule` and `list_schedule` order actions without it.

    Example:
        >>> costs = Costs(forward=1, input_grad=1.5, weight_grad=0.5)
        >>> costs.backward
        2.0
        >>> Costs(forward=[1, 2]).backward
        (2.0, 4.0)
    """

    forward: Cost = 1.0
    backward: Cost | None = None
    input_grad: Cost | None = None
    weight_grad: Cost | None = None
    transfer: Cost = 0.0
    recompute: Cost | None = None
    gradient_sum: Cost = 0.0
    all_gather: Cost = 0.0

    def __post_init__(self) -> None:
        given = {
            name: _checked(name, value) for name, value in vars(self).items() if value is not None
        }
        lengths = {name: len(value) for name, value in given.items() if isinstance(value, tuple)}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ScheduleError(f"costs differ in length: {sizes}; give one value a stage to all")
        forward = given.setdefault("forward", 1.0)
        given.setdefault("transfer", 0.0)
        given.setdefault("recompute", forward)
        if "backward" not in given:
            input_grad = given.setdefault("input_grad", forward)
            given["backward"] = _combine(input_grad, given.setdefault("weight_grad", forward), 1.0)
        elif "input_grad" not in given and "weight_grad" not in given:
            half = _combine(given["backward"], given["backward"], -0.5)
            given |= {"input_grad": half, "weight_grad": half}
        elif "input_grad" not in given:
            given["input_grad"] = _rest(given, "weight_grad")
        elif "weight_grad" not in given:
            given["weight_grad"] = _rest(given, "input_grad")
        for name, value in given.items():
            object.__setattr__(self, name, value)

    @property
    def num_stages(self) -> int | None:
        """Number of stages that the costs are for; None if every cost is one number."""
        for value in dataclasses.astuple(self):
            if isinstance(value, tuple):
                return len(cast(tuple[float, ...], value))
        return None

    def per_stage(self, num_stages: int) -> StageCosts:
        """Spreads every cost to one value for each of `num_stages` stages.

        Raises:
            ScheduleError: a cost has another length.
        """
        (num_stages,) = check_counts(num_stages=num_stages)
        spread: list[tuple[float, ...]] = []
        for name in FIELDS:
            value: _Values = getattr(self, name)
            items = value if isinstance(value, tuple) else (value,) * num_stages
            if len(items) != num_stages:
                raise ScheduleError(
                    f"cost {name} has {len(items)} values, but the schedule has {num_stages} "
                    "stages; give one number, or one value a stage"
                )
            spread.append(items)
        return StageCosts(*spread)

    def refined(self, pieces: int, num_slices: int = 1) -> Costs:
        """Returns the costs of the same model with each stage cut into equal pieces.

        Durations are divided by the number of pieces, and every boundary between pieces costs the
        transfer of the stage that was cut.

        Args:
            pieces: number of new stages that each old stage becomes, at least 1.
            num_slices: number of slices of equal cost into which sequences are cut, at least 1. All
                durations are divided, transfers too: each carries its share of the sequence.

        Returns:
            The finer costs.

        Example:
            >>> Costs(forward=[2, 4], transfer=1).refined(2).forward
            (1.0, 1.0, 2.0, 2.0)
        """
        pieces, num_slices = check_counts(pieces=pieces, num_slices=num_slices)

        def cut(name: str) -> Any:
            value: _Values = getattr(self, name)
            # There is one sum a stage, and a fetch of whole weights, whatever slices there are.
            divisors = {"transfer": num_slices, "gradient_sum": pieces, "all_gather": pieces}
            divisor = divisors.get(name, pieces * num_slices)
            if isinstance(value, tuple):
                return tuple(item / divisor for item in value for _ in range(pieces))
            return value / divisor

        return Costs(*map(cut, FIELDS))


@dataclasses.dataclass(frozen=True)
class StageCosts:
    """Costs with one value a stage for everything; see `Costs`."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[float, ...]
    recompute: tuple[float, ...]
    gradient_sum: tuple[float, ...]
    all_gather: tuple[float, ...]

    def durations(self) -> dict[str, tuple[float, ...]]:
        """Returns for each kind of action its duration on each stage."""
        return {kind: getattr(self, name) for kind, name in FIELD_OF.items()}


def _checked(name: str, value: Any) -> _Values:
    if isinstance(value, str | bool | Mapping | Set):
        raise ScheduleError(
            f"cost {name} is {short(cast(object, value))}; give a number or one number a stage"
        )
    one_a_stage = hasattr(value, "__len__")
    try:
        items = tuple(float(item) for item in (value if one_a_stage else (value,)))
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(
            f"cost {name} is {short(value)}; give a number or one number a stage"
        ) from None
    if not items:
        raise ScheduleError(f"cost {name} is empty; give one number or one value a stage")
    for index, item in enumerate(items):
        if not (math.isfinite(item) and item >= 0):
            where = f" of stage {index}" if one_a_stage else ""
            raise ScheduleError(
                f"cost {name}{where} is {item}; durations are finite and not negative"
            )
    return items if one_a_stage else items[0]


def _combine(one: _Values, two: _Values, sign: float) -> _Values:
    """Returns `one + sign * two`, spreading a single number over the values of the other."""
    if not isinstance(one, tuple) and not isinstance(two, tuple):
        return one + sign * two
    ones = one if isinstance(one, tuple) else itertools.repeat(one)
    twos = two if isinstance(two, tuple) else itertools.repeat(two)
    return tuple(a + sign * b for a, b in zip(ones, twos, strict=False))


def _rest(given: Mapping[str, _Values], name: str) -> _Values:
    """Returns what the part of a name leaves of the whole backward."""
    rest = _combine(given["backward"], given[name], -1.0)
    if min(rest if isinstance(rest, tuple) else (rest,)) < 0:
        raise ScheduleError(
            f"cost {name} is {given[name]}, more than the whole backward, {given['backward']}; "
            "give both input_grad and weight_grad"
        )
    return rest


FIELDS = tuple(field.name for field in dataclasses.fields(Costs))
_SHORT = {name[0]: name for name in FIELDS}


def costs_from_text(text: str) -> Costs:
    """Parses costs such as `1,2` or `f=1:1:1:2,t=0.1`; errors name the column."""
    # Several numbers with colons between are one a stage. Names may be cut to their first letter,
    # or left out if the values come in the order of `Costs`.
    values: dict[str, _Values] = {}
    column = 1
    for index, part in enumerate(text.split(",")):
        name, equals, value = part.partition("=")
        where = f"costs, column {column}"
        column += len(part) + 1
        if equals:
            name = name.strip()
            name = _SHORT.get(name, name)
            try:
                check_name("cost", name, FIELDS)
            except ScheduleError as error:
                raise ScheduleError(f"{where}: {error}") from None
        else:
            value = part
            if index >= len(FIELDS):
                raise ScheduleError(f"{where}: more than {len(FIELDS)} values: {', '.join(FIELDS)}")
            name = FIELDS[index]
        if name in values:
            raise ScheduleError(f"{where}: {name} is given twice")
        values[name] = _values(value, where)
    return Costs(**values)


def costs_to_text(costs: Costs) -> str:
    """Writes costs as `costs_from_text` parses them, without loss."""
    return ",".join(f"{name}={_joined(getattr(costs, name))}" for name in FIELDS)


def _joined(value: _Values) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return ":".join(repr(item).removesuffix(".0") for item in values)


def _values(text: str, where: str) -> _Values:
    values: list[float] = []
    for item in text.split(":"):
        try:
            values.append(float(item))
        except ValueError:
            raise ScheduleError(
                f"{where}: {item.strip()!r} is not a number; write for example forward=1,"
                "backward=2, or forward=1:1:2:1 for one value a stage"
            ) from None
    return tuple(values) if len(values) > 1 else values[0]
