"""What somebody who misspelt a name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
