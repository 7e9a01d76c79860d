"""Text for people: tables in columns, numbers, and suggestions for misspelt words."""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Container, Iterable, Sequence
from fractions import Fraction
from typing import Any

# Least similarity of two names that differ only by a typing error: `bacth` and `batch`, but not
# `dim_in` and `dim_out`.
_ALMOST_EQUAL = 0.75
_BYTES = {
    "": 1,
    "B": 1,
    **{
        f"{prefix}{end}": 1000**power for power, prefix in enumerate("KMGT", 1) for end in ("", "B")
    },
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


def columns(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Aligns rows in columns, one line of text for each row.

    Columns whose numbers are in `left` are left-aligned, others right-aligned. Rows have equal
    length.

    Example:
        >>> columns([["stage", "cost"], ["0", "12.5"]])
        ['stage  cost', '0      12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def number(value: float, digits: int = 4) -> str:
    """Writes a number with some significant digits, whole from 1,000 on, without an exponent.

    Example:
        >>> number(33.0), number(0.123456), number(123456.0), number(3.14159, digits=3)
        ('33', '0.1235', '123456', '3.14')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def short(value: float | None) -> str:
    """Writes a number for people, large ones with M or G.

    Example:
        >>> short(1234567.0), short(12345.6), short(0.00012345), short(2e30), short(None)
        ('1.235M', '12,346', '0.0001234', '2e+30', 'not finite')
    """
    if value is None or not math.isfinite(value):
        return "not finite"
    if 1e6 <= abs(value) < 1e12:
        power, letter = (9, "G") if abs(value) >= 1e9 else (6, "M")
        return f"{value / 10**power:.4g}{letter}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return number(value) if abs(value) < 1e12 else f"{value:.3g}"


def number_text(number: float) -> str:
    """Returns a cost with four digits, such as `12.35`."""
    if number == int(number) and abs(number) < 1e9:
        return str(int(number))
    return f"{number:.4g}" if not 1e3 <= abs(number) < 1e6 else f"{number:.1f}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known word that is most similar to `word`; None if none is similar.

    The least similarity `cutoff` is from 0 to 1, as in `difflib.get_close_matches`.
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def almost_equal(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name of which `name` is probably a misspelling; None if there is none."""
    return nearest(name, known, _ALMOST_EQUAL)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns a part of an error message, with a blank after it; empty if no known word is similar.

    Example:
        >>> did_you_mean("gpip", ["gpipe"]), did_you_mean("x", ["gpipe"])
        ("did you mean 'gpipe'? ", '')
    """
    near = nearest(word, known, cutoff)
    return "" if near is None else f"did you mean {near!r}? "


def nearest_text(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name.

    Example:
        >>> nearest_text("modle", ["data", "model"])
        "; did you mean 'model'? Known: 'data', 'model'"
        >>> nearest_text("x", [])
        '; there are none'
    """
    names = list(known)
    if not names:
        return "; there are none"
    meant = did_you_mean(name, names)
    return f"; {meant}{'Known' if meant else 'known'}: " + ", ".join(map(repr, names))


def several(noun: str) -> str:
    """Returns the plural of a noun.

    Example:
        >>> several("worker"), several("process"), several("microbatch")
        ('workers', 'processes', 'microbatches')
    """
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


def is_missing(module: str, error: ModuleNotFoundError) -> bool:
    """Returns whether `error` concerns the module itself, and not one that it imports.

    Example:
        >>> is_missing("models.digits", ModuleNotFoundError(name="models"))
        True
        >>> is_missing("models.digits", ModuleNotFoundError(name="sklearn"))
        False
    """
    return error.name is not None and f"{module}.".startswith(f"{error.name}.")


def count_text(number: int, what: str) -> str:
    """Returns a number of things, such as `1 stage` or `2 stages`."""
    return f"{number} {what if number == 1 else several(what)}"


def bytes_of(text: str) -> float:
    """Returns the bytes that a text such as `16GiB`, `80GB` or `25e9` means; raises ValueError."""
    digits, unit = text.strip(), ""
    while digits and digits[-1].isalpha():
        digits, unit = digits[:-1], digits[-1] + unit
    if unit.upper() not in _BYTES:
        raise ValueError(
            f"{text!r} has the unit {unit!r}; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    try:
        return float(digits) * _BYTES[unit.upper()]
    except ValueError:
        raise ValueError(f"{text!r} is no number of bytes such as 16GiB, 80GB or 25e9") from None


def bytes_text(number: float, up: bool = False) -> str:
    """Returns bytes as text such as `18.2 GiB`; `up` rounds up, where the number is a need."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            scaled = number / 2**power
            # As a decimal, so that 1.1 is not rounded up to 1.2.
            rounded = math.ceil(Fraction(repr(float(scaled))) * 10) / 10 if up else scaled
            return f"{rounded:.1f} {unit}"
    return f"{math.ceil(number) if up else number:g} B"


def toml_of(path: str) -> dict[str, Any]:
    """Returns the values of a TOML file; raises OSError, ValueError or RecursionError."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    with open(path, encoding="utf-8-sig", newline="") as file:
        return toml.loads(file.read())
