"""Dims of a plain tensor before a layer names them."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.mesh import Shape

_PREFIX = "unnamed_"


def unnamed(sizes: Sequence[int], batch_dim: int, batch: str = "batch") -> Shape:
    """Returns a shape in which only the batch dim has a name that a layout may use.

    Example:
        >>> str(unnamed([8, 3], 0))
        'batch:8;unnamed_1:3'
    """
    names = [batch if i == batch_dim else f"{_PREFIX}{i}" for i in range(len(sizes))]
    return Shape.of(**dict(zip(names, sizes, strict=True)))


def is_unnamed(shape: Shape) -> bool:
    """Returns whether a shape is a result of `unnamed` with other dims than the batch's."""
    return any(name.startswith(_PREFIX) for name in shape.names)
