"""What may be a name, and what a size."""

from __future__ import annotations

import operator
import re


def is_name(value: object) -> bool:
    """Whether a value is a text of letters, digits and underscores that no digit begins."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) is not None


def whole_number(value: object) -> int | None:
    """The value as a number of Python; None if it is none, as 2.5, NaN, True and `"2"` are.

    Example:
        >>> import numpy as np
        >>> whole_number(np.int64(3)), whole_number(2.0), whole_number(True)
        (3, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
