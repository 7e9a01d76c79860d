"""Exchange of rows with neighbours: shift and halo exchange."""

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
    """Moves all rows of a dim by `offset` rows; sends only rows that cross a slice's border.

    Args:
        x: any tensor.
        dim: the name of the dim.
        offset: may be negative.
        wrap: whether rows that leave at one end enter at the other, as in `tf.roll`; otherwise
            zeros enter.

    Raises:
        ShapeError: the name is unknown.
    """
    return Tensor(x.lowering, _shifted(x, x.slices, dim, offset, wrap), x.shape)


def _shifted(x: Tensor, slices: Slices, dim: str, offset: int, wrap: bool) -> Slices:
    """Shifts slices whose `dim` is split like that of `x`."""
    at = x.shape.index(dim)
    size, rows = x.shape[dim].size, x.layout.slice_shape[at]
    # An offset beyond the size gives zeros, or wraps around.
    offset = offset % max(size, 1) if wrap else max(-size, min(size, offset))
    windows = Windows(size, -offset, rows, rows, wrap)
    return take_windows(x.lowering, slices, x.layout.axes[at], at, windows)


@register("neighbours", "permute", "all_gather", "slice")
def halo_exchange(x: Tensor, blocks: str, rows: str, halo: int, *, wrap: bool = False) -> Tensor:
    """Extends each block by the nearest rows of the blocks before and behind it.

    If the blocks are split, each neighbour gets `halo` rows and nothing else. The gradients of
    these rows go back and are added. If the rows are split too, blocks are joined beforehand.

    Args:
        x: any tensor.
        blocks: the name of the dim that counts the blocks.
        rows: the name of the dim that counts the rows in a block.
        halo: number of rows of each neighbour; at most the rows of a block.
        wrap: whether the first and the last block are neighbours; otherwise zeros surround them.

    Returns:
        `x` with `2 * halo` more rows.

    Raises:
        ShapeError: a block has fewer rows than `halo`.
        LayoutError: the rules cannot split the result.
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
