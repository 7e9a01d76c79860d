"""Runs of rows that do not end where slices end; only the needed rows move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.operations import sum_in_order
from pipemesh.backend.static_shape import static_sizes
from pipemesh.lowering.lowering import Lowering, Slices


@dataclasses.dataclass(frozen=True)
class Windows:
    """A run of `length` rows of a dim for each processor along an axis.

    The run of processor i begins at row `start + i * stride`. Rows outside of the dim are zeros.
    Runs may overlap and need not cover the dim.

    Attributes:
        size: the size of the whole dim.
        start: the first row of the first run; may be negative.
        stride: the distance from run to run.
        length: the length of each run.
        wrap: whether the dim is a circle, so that no row is outside of it. Then `stride` is the
            number of rows of a processor.
    """

    size: int
    start: int
    stride: int
    length: int
    wrap: bool = False


def take_windows(
    lowering: Lowering, x: Slices, axis: str | None, dim: int, windows: Windows
) -> Slices:
    """Gives each processor its run of rows, from a dim that is split over `axis` (None for none).

    If `stride` is a slice's size, as for a halo exchange, one permute per neighbour sends just the
    needed rows. Otherwise (`slice`, `pad`, strided convolutions), pieces of one distance travel
    together, and each is as long as the longest of them. In the gradient each row gets the sum over
    all runs that contain it, so the gradient of a halo is sent back and added.
    """
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
    """Rows that each processor gets from another one at a fixed distance.

    Attributes:
        distance: the distance in processors.
        length: the number of rows.
        sources: the first row in the slice of each source.
        places: the first row in the run of each target.
        targets: the processors that receive rows.
    """

    distance: int
    length: int
    sources: list[int]
    places: list[int]
    targets: list[int]


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
    pieces: list[Slices] = []
    for found in _pieces(windows, parts):

        def cut(t: tf.Tensor, i: tf.Tensor, of: _Piece = found) -> tf.Tensor:
            return _rows_from(t, dim, tf.constant(of.sources)[i], of.length)

        def place(t: tf.Tensor, i: tf.Tensor, of: _Piece = found) -> tf.Tensor:
            return _rows_from(t, dim, -tf.constant(of.places)[i], windows.length)

        piece = lowering.map(cut, x, at) if found.length < rows else x
        if found.distance:
            pairs = [(target + found.distance, target) for target in found.targets]
            piece = lowering.permute(piece, axis, pairs)
        pieces.append(lowering.map(place, piece, at))
    if not pieces:
        return _nothing(lowering, x, dim, windows.length)
    return lowering.map(lambda *arrived: sum_in_order(arrived), *pieces)


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
    """Returns `length` rows from `begin` on, with zeros outside of the slice.

    `begin` lies between `-length` and the number of rows.
    """

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


def sum_of(lowering: Lowering, tensors: Sequence[Slices]) -> Slices:
    """Adds tensors element by element; joins booleans by logical or."""
    if tensors[0][0].dtype == tf.bool:
        return lowering.map(lambda *parts: tf.reduce_any(tf.stack(parts), 0), *tensors)
    return lowering.map(lambda *parts: sum_in_order(parts), *tensors)
