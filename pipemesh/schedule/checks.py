"""Checks on what callers pass: each returns it in Python's own type, or says what is wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any, SupportsIndex, TypeVar, cast

from pipemesh.errors import ScheduleError
from pipemesh.text import did_you_mean, several

T = TypeVar("T")


def check_counts(**counts: SupportsIndex) -> tuple[int, ...]:
    """Returns the counts as integers, in the order given.

    Args:
        **counts: each count under the name of the argument it came from.

    Raises:
        ScheduleError: a count is no integer or below 1; says which.

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
    """Returns a value if it has the type that it must have.

    Raises:
        ScheduleError: it has another type.

    Example:
        >>> check_type("text", "0F0 0B0", str)
        '0F0 0B0'
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
        raise ScheduleError(f"{name} is {short(value)}; it must be {article} {kind.__name__}")
    return value


def check_number(
    name: str, value: object, least: float = 0.0, most: float = math.inf, above: bool = False
) -> float:
    """Returns any kind of number as a float.

    Args:
        name: of the argument.
        value: what was given for it.
        least: the smallest number that is allowed.
        most: the largest one.
        above: whether it must be larger than `least`.

    Raises:
        ScheduleError: it is no number, not finite, or out of range.

    Example:
        >>> from fractions import Fraction
        >>> check_number("jitter", Fraction(1, 4), most=1)
        0.25
    """
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
    name: str, values: object, length: int | None = None, of: str = "device"
) -> tuple[int, ...]:
    """Returns a sequence of whole numbers from 0 on as a tuple of integers.

    Args:
        name: of the argument.
        values: what was given for it.
        length: how many there must be, if that is known.
        of: what each number is for, if the length is known.

    Raises:
        ScheduleError: it is no sequence of whole numbers, has another length, or one is below 0.

    Example:
        >>> check_indices("stage_devices", [0, 1])
        (0, 1)
    """
    try:
        if isinstance(values, Mapping | Set):
            raise TypeError
        found = tuple(operator.index(value) for value in cast("Iterable[Any]", values))
    except TypeError:
        each = f", one a {of}" if length is not None else ""
        raise ScheduleError(
            f"{name} is {short(cast(object, values))}; it must be a sequence of whole numbers{each}"
        ) from None
    if length is not None and len(found) != length:
        raise ScheduleError(
            f"{name} has {len(found)} values, but there are {length} {several(of)}; give one a {of}"
        )
    for index, value in enumerate(found):
        if value < 0:
            raise ScheduleError(f"{name}[{index}] is {value}; it must be at least 0")
    return found


def short(value: object) -> str:
    """Writes a value so that it fits a line.

    Example:
        >>> short("x" * 100)
        'a str'
    """
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def check_name(what: str, name: str, known: Iterable[str]) -> str:
    """Returns `name` if it is known.

    Args:
        what: what the name is of, for the message.
        name: what the caller wrote.
        known: all names there are.

    Raises:
        ScheduleError: it is not; suggests the nearest and lists all.

    Example:
        >>> check_name("schedule", "gpipe", ["gpipe", "zb_v"])
        'gpipe'
    """
    names = list(known)
    if name in names:
        return name
    hint = did_you_mean(str(name).lower().replace("-", "_"), names, cutoff=0.5)
    raise ScheduleError(f"unknown {what} {name!r}; {hint}known are {', '.join(sorted(names))}")
