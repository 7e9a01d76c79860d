"""Tensors with named dims among values that are nested in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipemesh.lowering import Tensor, ops

T = TypeVar("T")


def map_kind(kind: type[T] | tuple[type[T], ...], function: Callable[[T], Any], value: Any) -> Any:
    """The value, with the function's result in place of each thing of a kind.

    Args:
        kind: a class, such as that of tensors with named dims, or several.
        function: of such a thing.
        value: things of this and other kinds, by themselves or nested in lists, tuples and dicts.

    Example:
        >>> map_kind(int, lambda x: -x, ([1, {"a": 2.0}], (3,)))
        ([-1, {'a': 2.0}], (-3,))
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        new: Any = type(value)()
        for key in value:
            new[key] = map_kind(kind, function, value[key])
        return new
    if isinstance(value, (list, tuple)):
        parts = [map_kind(kind, function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def exported(value: Any) -> Any:
    """The value, with tensors with named dims joined on the first device of their lowering."""
    return map_kind(Tensor, ops.export_tensor, value)
