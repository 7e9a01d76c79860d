"""Rows of a dim: shift, halo exchange, slice, pad, concat, split, stack, unstack.

A processor may need rows that do not end where slices end; only the needed rows move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.operations import sum_in_order
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import check_operands, register
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.ops.relayout import change_splits, transpose
from pipemesh.lowering.tensor import Tensor, check_same_lowering
from pipemesh.mesh import Dim, Shape


@dataclasses.dataclass(frozen=True)
class Windows:
    """A run of `length` rows of a dim for each processor i, from row `start + i * stride` on."""

    # Rows outside of the dim are zeros. Runs may overlap and need not cover the dim.
    size: int  # of the whole dim
    start: int  # may be negative
    stride: int
    length: int
    # The dim is a circle without an outside. Then `stride` is the number of rows of a processor.
    wrap: bool = False


def take_windows(
    lowering: Lowering, x: Slices, axis: str | None, dim: int, windows: Windows
) -> Slices:
    """Gives each processor its run of rows of a dim that is split over `axis`."""
    # If `stride` is a slice's size, as for a halo exchange, one permute per neighbour sends just
    # the needed rows. Otherwise (`slice`, `pad`, strided windows), pieces of one distance
    # travel together, and each is as long as the longest of them. In the gradient each row gets the
    # sum over all runs that contain it, so the gradient of a halo is sent back and added.
    if x[0].dtype == tf.bool:
        # A permute sends numbers only.
        ints = lowering.map(lambda t: tf.cast(t, tf.int32), x)
        taken = take_windows(lowering, ints, axis, dim, windows)
        return lowering.map(lambda t: tf.cast(t, tf.bool), taken)
    parts = lowering.mesh.size(axis) if axis else 1
    rows = windows.size // parts
    if rows == 0:
        return _nothing(lowering, x, dim, windows.length)
    if parts == 1 or windows.stride == rows:
        return _along_slices(lowering, x, axis, dim, windows, parts)
    return _across_slices(lowering, x, axis or "", dim, windows, parts)


def rows_sent(windows: Windows, parts: int) -> list[int]:
    """Returns the number of rows that each permute of `take_windows` sends."""
    rows = windows.size // parts
    if parts == 1 or rows == 0:
        return []
    if windows.stride == rows:
        return [n for _, n, pairs in _blocks(windows, parts) if any(a != b for a, b in pairs)]
    return [piece.length for piece in _pieces(windows, parts) if piece.distance]


def _blocks(windows: Windows, parts: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yields first row, length and senders for each block of runs that follow the slices."""
    rows = windows.size // parts
    end = windows.start + windows.length
    for distance in range(windows.start // rows, -(-end // rows)):
        begin = max(windows.start - distance * rows, 0)
        length = min(end - distance * rows, rows) - begin
        pairs = [
            ((at + distance) % parts, at)
            for at in range(parts)
            if windows.wrap or 0 <= at + distance < parts
        ]
        yield begin, length, pairs


def _along_slices(
    lowering: Lowering, x: Slices, axis: str | None, dim: int, windows: Windows, parts: int
) -> Slices:
    rows = windows.size // parts
    pieces: list[Slices] = []
    # For each block of the run, in order: its piece, or its number of zeros.
    blocks: list[int | None] = []
    for begin, length, pairs in _blocks(windows, parts):
        if not pairs:
            blocks.append(length)
            continue
        piece = x
        if length < rows:
            piece = lowering.map(lambda t, b=begin, n=length: rows_of(t, dim, b, n), x)
        if axis and any(source != target for source, target in pairs):
            piece = lowering.permute(piece, axis, pairs)
        pieces.append(piece)
        blocks.append(None)
    if not pieces:
        return _nothing(lowering, x, dim, windows.length)
    if len(blocks) == 1:
        return pieces[0]

    def join(*arrived: tf.Tensor) -> tf.Tensor:
        rest = iter(arrived)
        return tf.concat(
            [next(rest) if n is None else _zeros(arrived[0], dim, n) for n in blocks], dim
        )

    return lowering.map(join, *pieces)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows that each processor gets from another one at a fixed distance."""

    distance: int  # in processors
    length: int
    sources: list[int]  # the first row in the slice of each source
    places: list[int]  # the first row in the run of each target
    targets: list[int]  # the processors that receive rows


def _pieces(windows: Windows, parts: int) -> Iterator[_Piece]:
    """Yields the pieces of runs that do not follow the slices."""
    rows = windows.size // parts
    for distance in range(1 - parts, parts):
        # For each target the rows of its source, counted within the source's slice.
        needed: dict[int, tuple[int, int]] = {}
        for target in range(max(0, -distance), min(parts, parts - distance)):
            first = windows.start + target * windows.stride - (target + distance) * rows
            begin, end = max(first, 0), min(first + windows.length, rows)
            if begin < end:
                needed[target] = (begin, end)
        if not needed:
            continue
        length = max(end - begin for begin, end in needed.values())
        # First rows in the source and in the target. Rows sent beyond the needed ones fall outside
        # of the target's run.
        sources, places = [0] * parts, [windows.length] * parts
        for target, (begin, _) in needed.items():
            source = target + distance
            sources[source] = min(begin, rows - length)
            row = source * rows + sources[source]
            places[target] = row - windows.start - target * windows.stride
        yield _Piece(distance, length, sources, places, list(needed))


def _across_slices(
    lowering: Lowering, x: Slices, axis: str, dim: int, windows: Windows, parts: int
) -> Slices:
    rows = windows.size // parts
    at = lowering.coordinate(axis)
    runs: list[Slices] = []
    for piece in _pieces(windows, parts):

        def cut(t: tf.Tensor, i: tf.Tensor, piece: _Piece = piece) -> tf.Tensor:
            return _rows_from(t, dim, tf.constant(piece.sources)[i], piece.length)

        def place(t: tf.Tensor, i: tf.Tensor, piece: _Piece = piece) -> tf.Tensor:
            return _rows_from(t, dim, -tf.constant(piece.places)[i], windows.length)

        slices = lowering.map(cut, x, at) if piece.length < rows else x
        if piece.distance:
            pairs = [(target + piece.distance, target) for target in piece.targets]
            slices = lowering.permute(slices, axis, pairs)
        runs.append(lowering.map(place, slices, at))
    if not runs:
        return _nothing(lowering, x, dim, windows.length)
    return lowering.map(lambda *arrived: sum_in_order(arrived), *runs)


def first_rows(lowering: Lowering, axis: str | None, windows: Windows) -> Slices:
    """Returns the row of the dim where each processor's run begins."""
    if axis is None:
        return lowering.raw_map(lambda: tf.constant(windows.start))
    return lowering.raw_map(
        lambda at: windows.start + at * windows.stride, lowering.coordinate(axis)
    )


def fill_outside(
    lowering: Lowering, x: Slices, axis: str | None, dim: int, windows: Windows, value: float
) -> Slices:
    """Returns runs of rows with `value` in the rows outside of the dim."""
    length = windows.length

    def fill(run: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        row = first + tf.range(length)
        inside = (row >= 0) & (row < windows.size)
        inside = tf.reshape(inside, [length if i == dim else 1 for i in range(run.shape.rank)])
        return tf.where(inside, run, tf.cast(value, run.dtype))

    return lowering.map(fill, x, first_rows(lowering, axis, windows))


def rows_of(tensor: tf.Tensor, dim: int, begin: int, length: int) -> tf.Tensor:
    """Returns the rows `[begin, begin + length)` of a dim of one slice."""
    sizes = tensor.shape.as_list()
    sizes[dim] = length
    begins = [0] * len(sizes)
    begins[dim] = begin
    return tf.slice(tensor, begins, sizes)


def _nothing(lowering: Lowering, x: Slices, dim: int, length: int) -> Slices:
    """Returns zeros that depend on `x`, so that their gradient is zeros and not None."""
    return lowering.map(
        lambda t: tf.concat([rows_of(t, dim, 0, 0), _zeros(t, dim, length)], dim), x
    )


def _zeros(like: tf.Tensor, dim: int, length: int) -> tf.Tensor:
    sizes = like.shape.as_list()
    sizes[dim] = length
    return tf.zeros(sizes, like.dtype)


def _rows_from(tensor: tf.Tensor, dim: int, begin: tf.Tensor, length: int) -> tf.Tensor:
    """Returns rows from `begin` on, which is above `-length`, with zeros outside of the slice."""

    def taken(t: tf.Tensor, at: tf.Tensor, number: int) -> tf.Tensor:
        sizes = t.shape.as_list()
        paddings = [[number if i == dim else 0] * 2 for i in range(len(sizes))]
        sizes[dim] = number
        begins = [at + number if i == dim else 0 for i in range(len(sizes))]
        return tf.slice(tf.pad(t, paddings), tf.stack(begins), sizes)

    # A TPU cannot compile the gradient of a slice with a computed begin; it can compile this one.
    @custom_gradient
    def call(t: tf.Tensor, at: tf.Tensor) -> Any:
        rows = static_sizes(t)[dim]
        return taken(t, at, length), lambda grad: (taken(grad, -at, rows), None)

    return call(tensor, begin) if tensor.dtype.is_floating else taken(tensor, begin, length)


def local_rows(
    lowering: Lowering, x: Slices, axis: str | None, dim: int, begin: int, size: int
) -> Slices:
    """Returns rows `[begin, begin + size)`, split over the same axis; rows outside are zeros."""
    parts = lowering.mesh.size(axis) if axis else 1
    whole = static_sizes(x[0])[dim] * parts
    share = size // parts
    return take_windows(lowering, x, axis, dim, Windows(whole, begin, share, share))


@register("neighbours", "permute")
def shift(x: Tensor, dim: str, offset: int, *, wrap: bool) -> Tensor:
    """Moves all rows of a dim by `offset` rows; sends only rows that cross a slice's border.

    Args:
        offset: may be negative.
        wrap: whether rows that leave at one end enter at the other, as in `tf.roll`; otherwise
            zeros enter.
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


def _with_rows(x: Tensor, dim: str, begin: int, size: int) -> Tensor:
    """Returns rows from `begin` on, zeros outside of the dim, and checks the result's layout."""
    shape = x.shape.replace(dim, Dim(dim, size))
    axis = x.lowering.tensor_layout(shape).axes[x.shape.index(dim)]
    slices = local_rows(x.lowering, x.slices, axis, x.shape.index(dim), begin, size)
    return Tensor(x.lowering, slices, shape)


@register("resize", "permute")
def slice(x: Tensor, dim: str, begin: int, size: int) -> Tensor:
    """Takes the rows `[begin, begin + size)` of a dim, which keeps its name.

    Args:
        begin: the first row.
        size: the number of rows; if the dim is split, a multiple of its number of slices.

    Raises:
        ShapeError: the dim has no such rows.
        LayoutError: the rules cannot split the result; `rename` the dim first.
    """
    if not (0 <= begin and 0 <= size and begin + size <= x.shape[dim].size):
        raise ShapeError(
            f"rows {begin} to {begin + size} of dim {dim!r} do not all lie in '{x.shape}'; rows "
            f"go from 0 to {x.shape[dim].size}"
        )
    return _with_rows(x, dim, begin, size)


@register("resize", "permute")
def pad(x: Tensor, dim: str, before: int, after: int, value: float = 0.0) -> Tensor:
    """Adds rows of one value before and behind those of a dim, which keeps its name.

    Args:
        before: the number of rows before.
        after: the number of rows behind.
        value: the value of the new elements, in the dtype of `x`.

    Raises:
        ShapeError: a number of rows is negative.
        LayoutError: the rules cannot split the result; `rename` the dim first.
    """
    if before < 0 or after < 0:
        raise ShapeError(f"dim {dim!r} cannot be padded by {before} and {after} rows; use `slice`")
    size = x.shape[dim].size
    padded = _with_rows(x, dim, -before, before + size + after)
    if not value:
        return padded
    if isinstance(value, float) and value.is_integer() and x.dtype.is_integer:
        value = int(value)
    check_operands("pad", [x, value])
    return with_rows_outside(padded, dim, before, before + size, value)


def with_rows_outside(x: Tensor, dim: str, first: int, end: int, value: float) -> Tensor:
    """Returns a tensor with `value` in the rows of a dim that are not in `[first, end)`."""
    at = x.shape.index(dim)
    share = x.layout.slice_shape[at]
    windows = Windows(end - first, -first, share, share)
    slices = fill_outside(x.lowering, x.slices, x.layout.axes[at], at, windows, value)
    return Tensor(x.lowering, slices, x.shape)


@register("resize", "permute")
def concat(tensors: Sequence[Tensor], dim: str) -> Tensor:
    """Joins tensors along a common dim, whose size may differ.

    Args:
        tensors: one or more, with the same dims in any order; only `dim` may differ in size.

    Returns:
        The dims in the order of the first tensor.

    Raises:
        ShapeError: dims or dtypes differ.
        LayoutError: the rules cannot split the result.
    """
    lowering = check_same_lowering(tensors)
    _check_alike(tensors, [tensor.shape.without(dim) for tensor in tensors])
    tensors = [transpose(tensor, tensors[0].shape.names) for tensor in tensors]
    sizes = [tensor.shape[dim].size for tensor in tensors]
    shape = tensors[0].shape.replace(dim, Dim(dim, sum(sizes)))
    at = shape.index(dim)
    axis = lowering.tensor_layout(shape).axes[at]
    if axis is None:
        joined = lowering.map(
            lambda *parts: tf.concat(parts, at), *(tensor.slices for tensor in tensors)
        )
        return Tensor(lowering, joined, shape)
    spread = [
        local_rows(lowering, tensor.slices, axis, at, -sum(sizes[:i]), sum(sizes))
        for i, tensor in enumerate(tensors)
        if sizes[i] or i == 0
    ]
    # Booleans are joined by logical or.
    is_bool = tensors[0].dtype == tf.bool
    joined = lowering.map(
        lambda *parts: tf.reduce_any(tf.stack(parts), 0) if is_bool else sum_in_order(parts),
        *spread,
    )
    return Tensor(lowering, joined, shape)


@register("resize", "permute")
def split(x: Tensor, dim: str, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Cuts a dim into pieces, each a tensor whose dim has the same name.

    Args:
        sizes: the sizes of the pieces, or the number of equal pieces.

    Raises:
        ShapeError: the sizes do not add up to that of the dim.
        LayoutError: the rules cannot split a piece; `rename` the dim first, or `reshape` it to two
            dims.
    """
    whole = x.shape[dim].size
    if isinstance(sizes, int):
        if sizes < 1 or whole % sizes:
            raise ShapeError(
                f"dim {dim!r} of '{x.shape}' cannot be cut into {sizes} equal pieces; give a "
                "divisor, or the sizes of all pieces"
            )
        sizes = [whole // sizes] * sizes
    if sum(sizes) != whole or min(sizes, default=0) < 0:
        raise ShapeError(
            f"pieces of sizes {list(sizes)} do not make up dim {dim!r} of '{x.shape}'; they have "
            f"to sum up to {whole}"
        )
    return tuple(_with_rows(x, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes))


@register("resize", "slice")
def stack(tensors: Sequence[Tensor], dim: str, position: int = 0) -> Tensor:
    """Joins tensors of one shape along a new dim.

    Args:
        tensors: one or more, with the same dims in any order.
        dim: the name of the new dim, whose size is the number of tensors.
        position: position of the new dim among those of the first tensor.

    Raises:
        ShapeError: dims or dtypes differ, or `dim` is one of them.
        LayoutError: the rules cannot split the result.
    """
    lowering = check_same_lowering(tensors)
    _check_alike(tensors, [tensor.shape for tensor in tensors])
    first = tensors[0].shape
    if not 0 <= position <= len(first):
        raise ShapeError(f"position {position} is none of 0 to {len(first)}, those in '{first}'")
    tensors = [transpose(tensor, first.names) for tensor in tensors]
    dims = first.dims
    shape = Shape((*dims[:position], Dim(dim, len(tensors)), *dims[position:]))
    axis = lowering.tensor_layout(shape).axes[position]
    slices = lowering.map(
        lambda *parts: tf.stack(parts, position), *(tensor.slices for tensor in tensors)
    )
    if axis is not None:
        slices = lowering.slice_along(slices, axis, position)
    return Tensor(lowering, slices, shape)


@register("resize", "all_gather")
def unstack(x: Tensor, dim: str) -> tuple[Tensor, ...]:
    """Cuts a tensor into its rows along a dim; the rows lack this dim.

    Args:
        dim: the name of the dim. If it is split, its rows go to all processors.
    """
    lowering = x.lowering
    at = x.shape.index(dim)
    axis = x.layout.axes[at]
    slices = x.slices if axis is None else lowering.all_gather(x.slices, axis, at)
    rest = x.shape.without(dim)

    def row(i: int) -> Tensor:
        return Tensor(
            lowering, lowering.map(lambda t: tf.squeeze(rows_of(t, at, i, 1), at), slices), rest
        )

    return tuple(row(i) for i in range(x.shape[dim].size))


def _check_alike(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
    for tensor, shape in zip(tensors, shapes, strict=True):
        if set(shape) != set(shapes[0]) or tensor.dtype != tensors[0].dtype:
            raise ShapeError(
                f"{tensor!r} cannot be joined with {tensors[0]!r}: their other dims and their "
                "dtypes have to be the same; use `rename`, `broadcast_to` or `cast`"
            )
