"""Tensors with named dims among values that are nested in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipemesh.lowering import Tensor, ops


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The value, with the function's result in place of each tensor with named dims.

    Args:
        function: of such a tensor.
        value: tensors and other things, by themselves or nested in lists, tuples and dicts.

    Example:
        >>> map_tensors(lambda x: None, ([1, {"a": 2.0}], (3,)))
        ([1, {'a': 2.0}], (3,))
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        new: Any = type(value)()
        for key in value:
            new[key] = map_tensors(function, value[key])
        return new
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def exported(value: Any) -> Any:
    """The value, with tensors with named dims joined on the first device of their lowering."""
    return map_tensors(ops.export_tensor, value)
