"""Registration of operations in the list of all operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from pipemesh.lowering.checked import checked
from pipemesh.lowering.op_list import OPS, Op

F = TypeVar("F", bound=Callable[..., Any])


def register(group: str, *communicates: str) -> Callable[[F], F]:
    """Returns a decorator that registers a function as an operation and makes it `checked`.

    Tests fail for an operation that has no cases in `tests/lowering/cases`. Do not list `vary` in
    `communicates`: every operation with several operands uses it.
    """

    def add(function: F) -> F:
        name = function.__name__
        if name in OPS:
            raise ValueError(f"operation {name!r} is registered twice; give it another name")
        careful = cast(F, checked(function))
        OPS[name] = Op(name, group, careful, communicates)
        return careful

    return add
