"""Costs as one word on a command line."""

from __future__ import annotations

import dataclasses

from pipemesh.errors import ScheduleError
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.names import check_name

FIELDS = tuple(field.name for field in dataclasses.fields(Costs))
_SHORT = {name[0]: name for name in FIELDS}


def costs_from_text(text: str) -> Costs:
    """Parses `forward=1,backward=2,transfer=0.1`.

    Values are numbers, or several numbers with colons between, one a stage. Names may be cut to
    their first letter, or left out if the values come in the order of `Costs`.

    Args:
        text: the word.

    Returns:
        The costs.

    Raises:
        ScheduleError: a name is unknown or twice, or a value is no number; with the column.

    Example:
        >>> costs_from_text("1,2").backward
        2.0
        >>> costs_from_text("f=1:1:1:2,t=0.1").forward
        (1.0, 1.0, 1.0, 2.0)
    """
    given: dict[str, float | tuple[float, ...]] = {}
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
        if name in given:
            raise ScheduleError(f"{where}: {name} is given twice")
        given[name] = _values(value, where)
    return Costs(**given)


def costs_to_text(costs: Costs) -> str:
    """Writes costs as `costs_from_text` parses them, without loss.

    Example:
        >>> costs_to_text(Costs(forward=[1, 2.5], backward=2))[:31]
        'forward=1:2.5,backward=2,input_'
    """
    return ",".join(f"{name}={_joined(getattr(costs, name))}" for name in FIELDS)


def _joined(value: float | tuple[float, ...]) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return ":".join(repr(item).removesuffix(".0") for item in values)


def _values(text: str, where: str) -> float | tuple[float, ...]:
    values: list[float] = []
    for item in text.split(":"):
        try:
            values.append(float(item))
        except ValueError:
            raise ScheduleError(
                f"{where}: {item.strip()!r} is no number; write for example forward=1,backward=2, "
                "or forward=1:1:2:1 for one value a stage"
            ) from None
    return tuple(values) if len(values) > 1 else values[0]
