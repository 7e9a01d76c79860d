"""Numbers as integers, so that equal sums compare equal.

In floating point `0.1 + 0.2 != 0.3`, and a partitioner that compares such sums takes one of two
equal cuts for the better one. Here every number becomes an integer multiple of a common unit.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]
"""An array of `int64`, or of Python integers where `int64` is too small."""

ROOM = 2**60
"""Sums stay below this, so that two of them still add up in an `int64`."""

_FLOAT_INTEGERS = 2**53
_MOST_DECIMALS = 15


def to_integers(values: npt.NDArray[np.float64]) -> tuple[Ints, Fraction] | None:
    """Writes decimal numbers as integers times one unit, without error.

    A float stands for the shortest decimal that rounds to it, so 0.1 is a tenth and not
    0.1000000000000000055.

    Args:
        values: finite numbers of zero or more.

    Returns:
        The integers and their unit (`values == integers * unit`), or `None` if the numbers have
        more than 15 decimals or too many digits for that.
    """
    for decimals in range(_MOST_DECIMALS + 1):
        scale = 10.0**decimals
        with np.errstate(over="ignore"):
            rounded = np.rint(values * scale)
        if rounded.size and float(rounded.max()) >= _FLOAT_INTEGERS:
            return None
        # Division rounds correctly, so equality holds exactly for floats nearest to a decimal.
        if np.array_equal(rounded / scale, values):
            integers = rounded.astype(np.int64)
            divisor = math.gcd(*integers.tolist())
            divisor = max(divisor, 1)
            return integers // divisor, Fraction(divisor, 10**decimals)
    return None


def to_big_integers(values: npt.NDArray[np.float64]) -> tuple[Ints, Fraction]:
    """Writes any floats as Python integers times one unit, without error.

    Args:
        values: finite numbers of zero or more; taken at their exact binary value.

    Returns:
        The integers (an object array) and their unit.
    """
    pairs = [float(value).as_integer_ratio() for value in values]
    # All denominators are powers of two, so the largest is the common one.
    common = max((denominator for _, denominator in pairs), default=1)
    integers = np.empty(len(pairs), dtype=object)
    integers[:] = [numerator * (common // denominator) for numerator, denominator in pairs]
    return integers, Fraction(1, common)


def decimal(value: float | Fraction) -> Fraction:
    """Reads one float as the shortest decimal that rounds to it.

    Args:
        value: a finite number.

    Returns:
        The decimal, for example a tenth for 0.1; a fraction as it is.
    """
    return value if isinstance(value, Fraction) else Fraction(repr(float(value)))


def search(rising: Ints, values: Any, side: Literal["left", "right"]) -> Ints:
    """`np.searchsorted` with a type that survives arrays of Python integers.

    Args:
        rising: sorted numbers.
        values: what to place among them.
        side: before or behind equal ones.

    Returns:
        Indices, an array even for one value.
    """
    return np.asarray(np.searchsorted(rising, values, side=side), dtype=np.int64)


def prefix_sums(values: Ints) -> Ints:
    """Sums the first 0, 1, ..., n values.

    Args:
        values: n integers.

    Returns:
        n + 1 integers.
    """
    sums = np.zeros(values.size + 1, dtype=values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums
