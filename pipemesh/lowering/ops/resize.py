"""Changes of the number of rows of a dim: slice, pad, concat, split, stack, unstack."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import check_operands
from pipemesh.lowering.ops.lookup import local_start
from pipemesh.lowering.ops.relayout import transpose
from pipemesh.lowering.ops.windows import local_rows, rows_of, sum_of
from pipemesh.lowering.registry import register
from pipemesh.lowering.tensor import Tensor, check_same_lowering
from pipemesh.mesh import Dim, Shape


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
        x: any tensor.
        dim: the name of the dim.
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
        x: any tensor.
        dim: the name of the dim.
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
    lowering = x.lowering
    at = x.shape.index(dim)
    start, share = local_start(lowering, padded.shape[dim])

    def fill(slice_: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
        row = begin + tf.range(share)
        inside = (row >= before) & (row < before + size)
        inside = tf.reshape(inside, [share if i == at else 1 for i in range(len(x.shape))])
        return tf.where(inside, slice_, tf.cast(value, slice_.dtype))

    return Tensor(lowering, lowering.map(fill, padded.slices, start), padded.shape)


@register("resize", "permute")
def concat(tensors: Sequence[Tensor], dim: str) -> Tensor:
    """Joins tensors along a common dim, whose size may differ.

    Args:
        tensors: one or more, with the same dims in any order; only `dim` may differ in size.
        dim: its name.

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
    return Tensor(lowering, sum_of(lowering, spread), shape)


@register("resize", "permute")
def split(x: Tensor, dim: str, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """Cuts a dim into pieces, each a tensor whose dim has the same name.

    Args:
        x: any tensor.
        dim: the name of the dim.
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
        x: any tensor.
        dim: the name of the dim. If it is split, its rows go to all processors.

    Raises:
        ShapeError: the name is unknown.
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
