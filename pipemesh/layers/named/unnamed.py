"""Dims of a plain tensor before a layer names them."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.mesh import Shape

_PREFIX = "unnamed_"


def unnamed(sizes: Sequence[int], batch_dim: int, batch: str = "batch") -> Shape:
    """A shape in which the batch's dim alone has a name that a layout may know.

    Args:
        sizes: of a whole tensor.
        batch_dim: the position of the batch's dim.
        batch: its name.

    Example:
        >>> str(unnamed([8, 3], 0))
        'batch:8;unnamed_1:3'
    """
    names = [batch if i == batch_dim else f"{_PREFIX}{i}" for i in range(len(sizes))]
    return Shape.of(**dict(zip(names, sizes, strict=True)))


def is_unnamed(shape: Shape) -> bool:
    """Whether a shape is one of `unnamed`, with a dim besides the batch's."""
    return any(name.startswith(_PREFIX) for name in shape.names)
