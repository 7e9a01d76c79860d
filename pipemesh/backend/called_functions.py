"""The graphs of the functions that an operation calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tensorflow.python.framework import op_def_registry


@functools.cache
def _attributes(kind: str) -> tuple[tuple[str, bool], ...]:
    """Which attributes of an operation are functions, and whether they are lists of them."""
    definition = op_def_registry.get(kind)
    if definition is None:
        return ()
    return tuple(
        (attribute.name, attribute.type == "list(func)")
        for attribute in definition.attr
        if attribute.type in ("func", "list(func)")
    )


def called_functions(graph: Any, operation: Any) -> Iterator[Any]:
    """The graphs of the functions that an operation calls, in the order of its attributes.

    Args:
        graph: that the operation is in.
        operation: any; most call none.
    """
    for attribute, several in _attributes(operation.type):
        value = operation.get_attr(attribute)
        for function in value if several else [value]:
            found = graph._get_function(function.name)
            if found is not None and getattr(found, "graph", None) is not None:
                yield found.graph
