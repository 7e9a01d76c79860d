"""Rows that go to their neighbours: shift and halo exchange."""

from __future__ import annotations

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.ops.relayout import change_splits
from pipemesh.lowering.ops.windows import Windows, rows_of, take_windows
from pipemesh.lowering.registry import register
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim


@register("neighbours", "permute")
def shift(x: Tensor, dim: str, offset: int, *, wrap: bool) -> Tensor:
    """Moves all rows of a dim `offset` rows up; only rows that cross a slice's border are sent.

    Args:
        x: any tensor.
        dim: the name of the dim.
        offset: may be negative.
        wrap: whether rows that leave at one end enter at the other, as in `tf.roll`; otherwise
            zeros do.

    Raises:
        ShapeError: the name is unknown.
    """
    return Tensor(x.lowering, _shifted(x, x.slices, dim, offset, wrap), x.shape)


def _shifted(x: Tensor, slices: Slices, dim: str, offset: int, wrap: bool) -> Slices:
    """Shifts slices that are split as those of `x` in this dim."""
    at = x.shape.index(dim)
    size, rows = x.shape[dim].size, x.layout.slice_shape[at]
    # Beyond the size all is zero, or it begins again.
    offset = offset % max(size, 1) if wrap else max(-size, min(size, offset))
    windows = Windows(size, -offset, rows, rows, wrap)
    return take_windows(x.lowering, slices, x.layout.axes[at], at, windows)


@register("neighbours", "permute", "all_gather", "slice")
def halo_exchange(x: Tensor, blocks: str, rows: str, halo: int, *, wrap: bool = False) -> Tensor:
    """Extends each block by the nearest rows of the blocks before and behind it.

    Where the blocks are split, `halo` rows go to each neighbour and nothing else does; the gradient
    sends theirs back and adds them. Where the rows are split as well, blocks are joined beforehand.

    Args:
        x: any tensor.
        blocks: the name of the dim that counts the blocks.
        rows: the name of the dim that counts the rows in a block.
        halo: how many rows of each neighbour; at most as many as a block has.
        wrap: whether the first and the last block are neighbours; otherwise zeros are.

    Returns:
        `x` with `2 * halo` more rows.

    Raises:
        ShapeError: a block does not have as many rows.
        LayoutError: the result cannot be split as the rules say.
    """
    size = x.shape[rows].size
    if not 0 <= halo <= size or blocks == rows:
        raise ShapeError(
            f"a halo of {halo} rows in dim {rows!r} cannot be taken from the neighbours in dim "
            f"{blocks!r} of '{x.shape}'; it has 0 to {size} rows, and the dims are two"
        )
    lowering = x.lowering
    at = x.shape.index(rows)
    shape = x.shape.replace(rows, Dim(rows, size + 2 * halo))
    axes = lowering.tensor_layout(shape).axes
    joined = tuple(None if i == at else axis for i, axis in enumerate(axes))
    slices = change_splits(lowering, x.slices, x.layout.axes, joined)
    if halo:
        last = lowering.map(lambda t: rows_of(t, at, size - halo, halo), slices)
        first = lowering.map(lambda t: rows_of(t, at, 0, halo), slices)
        before = _shifted(x, last, blocks, 1, wrap)
        behind = _shifted(x, first, blocks, -1, wrap)
        slices = lowering.map(lambda *t: tf.concat(t, at), before, slices, behind)
    return Tensor(lowering, change_splits(lowering, slices, joined, axes), shape)
