"""Checks of arguments: each returns the value in Python's own type, or raises a `ScheduleError`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any, SupportsIndex, TypeVar, cast

from pipemesh.errors import ScheduleError
from pipemesh.text import did_you_mean, several

T = TypeVar("T")


def check_counts(**counts: SupportsIndex) -> tuple[int, ...]:
    """Returns counts of at least 1 as integers, in the order of the keywords.

    Example:
        >>> check_counts(num_devices=4, num_microbatches=8)
        (4, 8)
    """
    checked: list[int] = []
    for name, value in counts.items():
        try:
            count = operator.index(value)
        except TypeError:
            raise ScheduleError(f"{name} is {value!r}; it must be an integer") from None
        if count < 1:
            raise ScheduleError(f"{name} is {count}; it must be at least 1")
        checked.append(count)
    return tuple(checked)


def check_type(name: str, value: object, kind: type[T]) -> T:
    """Returns a value if it is of a type; `name` is that of the argument."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
        raise ScheduleError(f"{name} is {short(value)}; it must be {article} {kind.__name__}")
    return value


def check_number(
    name: str, value: object, least: float = 0.0, most: float = math.inf, above: bool = False
) -> float:
    """Returns any kind of number from `least` (exclusive if `above`) to `most` as a float."""
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most) or (above and number == least):
        start = f"above {least:g}" if above else f"from {least:g} on"
        allowed = start if most == math.inf else f"from {least:g} to {most:g}"
        raise ScheduleError(f"{name} is {short(value)}; it must be a number {allowed}")
    return number


def check_indices(
    name: str, values: object, length: int | None = None, item: str = "device"
) -> tuple[int, ...]:
    """Returns a sequence of whole numbers from 0 on as a tuple; `length` says how many."""
    try:
        if isinstance(values, Mapping | Set):
            raise TypeError
        integers = tuple(operator.index(value) for value in cast("Iterable[Any]", values))
    except TypeError:
        per_item = f", one a {item}" if length is not None else ""
        raise ScheduleError(
            f"{name} is {short(cast(object, values))}; it must be a sequence of whole numbers"
            f"{per_item}"
        ) from None
    if length is not None and len(integers) != length:
        raise ScheduleError(
            f"{name} has {len(integers)} values, but there are {length} {several(item)}; "
            f"give one a {item}"
        )
    for index, value in enumerate(integers):
        if value < 0:
            raise ScheduleError(f"{name}[{index}] is {value}; it must be at least 0")
    return integers


def short(value: object) -> str:
    """Returns the text of a value, cut to fit a line."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def check_name(what: str, name: str, known: Iterable[str]) -> str:
    """Returns `name` if it is among `known`; the error suggests the nearest."""
    names = list(known)
    if name in names:
        return name
    hint = did_you_mean(str(name).lower().replace("-", "_"), names, cutoff=0.5)
    raise ScheduleError(f"unknown {what} {name!r}; {hint}known are {', '.join(sorted(names))}")
