"""The list of all operations, from which tests and the table in the README are made.

Tensors look up their operators here. This avoids an import cycle with the modules of operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on tensors with named dims.

    Attributes:
        name: the name of the function.
        group: the kind of operation, such as `"elementwise"`.
        function: the public function.
        communicates: the primitives that it may use, as one word each.
    """

    name: str
    group: str
    function: Callable[..., Any]
    communicates: tuple[str, ...]

    @property
    def summary(self) -> str:
        """Returns the first line of the function's docstring."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


OPS: dict[str, Op] = {}


def op_table() -> str:
    """Returns a Markdown table of all operations in the order of registration."""
    lines = ["| operation | group | communication | |", "|---|---|---|---|"]
    for op in OPS.values():
        sent = ", ".join(op.communicates) or "none"
        lines.append(f"| `{op.name}` | {op.group} | {sent} | {op.summary} |")
    return "\n".join(lines)
