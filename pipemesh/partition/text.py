"""Numbers, layers and bars as text."""

from __future__ import annotations

import math
from fractions import Fraction

_BAR_WIDTH = 30
# Of more stages than this, some are left out of tables.
MOST_ROWS = 64


def bytes_text(number: float, up: bool = False) -> str:
    """Writes a number of bytes.

    Args:
        number: of bytes.
        up: round up and not to the nearest, where the number is a need.

    Returns:
        For example `"18.2 GiB"`.
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            scaled = number / 2**power
            # As a decimal, so that 1.1 is not rounded up to 1.2.
            rounded = math.ceil(Fraction(repr(float(scaled))) * 10) / 10 if up else scaled
            return f"{rounded:.1f} {unit}"
    return f"{math.ceil(number) if up else number:g} B"


def count_text(number: int, what: str) -> str:
    """Writes a number of things.

    Args:
        number: how many.
        what: one of them, in English with a plural in s.

    Returns:
        For example `"1 stage"` or `"2 stages"`.
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def number_text(number: float) -> str:
    """Writes a cost with four digits.

    Args:
        number: the cost.

    Returns:
        For example `"12.35"`.
    """
    if number == int(number) and abs(number) < 1e9:
        return str(int(number))
    return f"{number:.4g}" if not 1e3 <= abs(number) < 1e6 else f"{number:.1f}"


def bar(share: float, block: str = "█") -> str:
    """Draws a bar.

    Args:
        share: from 0 to 1 of the full width.
        block: what to draw it with.

    Returns:
        The bar; something above zero is at least one block.
    """
    return block * max(round(share * _BAR_WIDTH), 1 if share > 0 else 0)


def layers_text(layers: range) -> str:
    """Writes the layers of a stage.

    Args:
        layers: the layer indices.

    Returns:
        For example `"4-7"`, or `"-"` for an empty stage.
    """
    if not layers:
        return "-"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
