"""The list of all operations: tests and the table in the README are made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pipemesh.lowering.checked import checked

F = TypeVar("F", bound=Callable[..., Any])


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


def register(group: str, *communicates: str) -> Callable[[F], F]:
    """Decorates the function of an operation, whose arguments are then `checked`.

    Tests fail for an operation that has no cases in `tests/lowering/cases`.

    Args:
        group: of operations that are alike.
        *communicates: the primitives that it may use. `vary` is understood: every operation with
            several operands uses it.

    Raises:
        ValueError: the name is taken, or the function has no documentation.
    """

    def add(function: F) -> F:
        name = function.__name__
        if name in OPS or not function.__doc__:
            raise ValueError(f"operation {name!r} is registered twice or has no documentation")
        careful = cast(F, checked(function))
        OPS[name] = Op(name, group, careful, communicates)
        return careful

    return add


def op_table() -> str:
    """All operations as a Markdown table, in the order of their registration."""
    import pipemesh.lowering.ops  # noqa: F401  (registers them)

    lines = ["| operation | group | communication | |", "|---|---|---|---|"]
    for op in OPS.values():
        sent = ", ".join(op.communicates) or "none"
        lines.append(f"| `{op.name}` | {op.group} | {sent} | {op.summary} |")
    return "\n".join(lines)


if __name__ == "__main__":
    # The module that operations register in is another one than the one that is run.
    from pipemesh.lowering import registry

    print(registry.op_table())
