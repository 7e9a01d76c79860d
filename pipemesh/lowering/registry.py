"""How operations get into the list of all operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from pipemesh.lowering.checked import checked
from pipemesh.lowering.op_list import OPS, Op

F = TypeVar("F", bound=Callable[..., Any])


def register(group: str, *communicates: str) -> Callable[[F], F]:
    """Decorates the function of an operation, whose arguments are then `checked`.

    Tests fail for an operation that has no cases in `tests/lowering/cases`.

    Args:
        group: of operations that are alike.
        *communicates: the primitives that it may use. `vary` is understood: every operation with
            several operands uses it.

    Raises:
        ValueError: the name is taken.
    """

    def add(function: F) -> F:
        name = function.__name__
        if name in OPS:
            raise ValueError(f"operation {name!r} is registered twice; give it another name")
        careful = cast(F, checked(function))
        OPS[name] = Op(name, group, careful, communicates)
        return careful

    return add
