"""What somebody who misspelt a name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# How alike two names are that only a slip of the pen tells apart: `bacth` and `batch`, not `dim_in`
# and `dim_out`.
_ALMOST_EQUAL = 0.75


def almost_equal(name: str, known: Iterable[str]) -> str | None:
    """The one of the known names that a name was perhaps meant to be; None if none is so near.

    Example:
        >>> almost_equal("hiden", ["batch", "hidden"]), almost_equal("dim_in", ["dim_out"])
        ('hidden', None)
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_ALMOST_EQUAL)
    return near[0] if near else None


def nearest_text(name: str, known: Iterable[str]) -> str:
    """Writes the end of an error message about an unknown name.

    Args:
        name: what was given.
        known: what is allowed.

    Example:
        >>> nearest_text("modle", ["data", "model"])
        "; did you mean 'model'? Known: 'data', 'model'"
        >>> nearest_text("x", [])
        '; there are none'
    """
    names = list(known)
    if not names:
        return "; there are none"
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {near[0]!r}? Known: " if near else "; known: "
    return meant + ", ".join(map(repr, names))
