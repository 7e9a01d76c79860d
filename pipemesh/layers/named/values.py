"""Tensors with named dims inside nested values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pipemesh.lowering import Tensor, ops

T = TypeVar("T")


def map_kind(kind: type[T] | tuple[type[T], ...], function: Callable[[T], Any], value: Any) -> Any:
    """Applies a function to each value of a kind, nested in lists, tuples and dicts.

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
    """Joins tensors with named dims in a value on the first device of their lowering."""
    return map_kind(Tensor, ops.export_tensor, value)
