"""The list of all operations, from which tests and the table in the README are made.

Tensors look up their operators here. This avoids an import cycle with the modules of operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on tensors with named dims."""

    name: str
    group: str  # such as "elementwise"
    function: Callable[..., Any]
    communicates: tuple[str, ...]  # the primitives that it may use


OPS: dict[str, Op] = {}


def op_table() -> str:
    """Returns a Markdown table of all operations in the order of registration."""
    lines = ["| operation | group | communication | |", "|---|---|---|---|"]
    for op in OPS.values():
        sent = ", ".join(op.communicates) or "none"
        summary = (op.function.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| `{op.name}` | {op.group} | {sent} | {summary} |")
    return "\n".join(lines)
