"""Checks of names, pairs and sizes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, cast


def is_name(value: object) -> bool:
    """Returns True for a string of letters, digits and underscores that no digit begins."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is not None


def text_of(value: object, error: Callable[[str], Exception], example: str) -> str:
    """Returns a string; for any other value raises `error` with an example."""
    if not isinstance(value, str):
        raise error(f"{value!r} is no text; write for example {example!r}")
    return value


def pairs_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns a list or tuple of pairs as a list; None for anything else."""
    if not isinstance(value, list | tuple):
        return None
    parts: list[Any] = list(cast(Any, value))
    if not all(isinstance(part, list | tuple) and len(cast(Any, part)) == 2 for part in parts):
        return None
    return [(part[0], part[1]) for part in parts]


def whole_number(value: object) -> int | None:
    """Returns the value as an int; None if it is not whole, such as 2.0, NaN, True and `"2"`."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
