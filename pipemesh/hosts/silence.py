"""All processes run one program, and one of them speaks."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_heard: list[TextIO] = []


def be_silent() -> None:
    """Lets this process say no more what the first one says, too; see `speak`."""
    _heard[:] = [sys.stdout, sys.stderr]
    nowhere = open(os.devnull, "w", encoding="utf-8")
    sys.stdout = sys.stderr = nowhere


def speak() -> None:
    """Lets it say again what it has to: an error."""
    if _heard:
        sys.stdout.close()
        sys.stdout, sys.stderr = _heard
        _heard.clear()


def is_silent() -> bool:
    """Whether this process says nothing now."""
    return bool(_heard)
