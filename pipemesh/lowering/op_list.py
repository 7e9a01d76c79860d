"""The list of all operations: tests and the table in the README are made of it.

Tensors look their operators up here, and so know nothing of the modules of operations, which are
made of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on tensors with named dims.

    Attributes:
        name: of the function.
        group: of operations that are alike, such as `"elementwise"`.
        function: the public function.
        communicates: the primitives that it may use, as one word each.
    """

    name: str
    group: str
    function: Callable[..., Any]
    communicates: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first line of its documentation."""
        return (self.function.__doc__ or "").strip().splitlines()[0]


OPS: dict[str, Op] = {}


def op_table() -> str:
    """All operations as a Markdown table, in the order of their registration."""
    lines = ["| operation | group | communication | |", "|---|---|---|---|"]
    for op in OPS.values():
        sent = ", ".join(op.communicates) or "none"
        lines.append(f"| `{op.name}` | {op.group} | {sent} | {op.summary} |")
    return "\n".join(lines)
