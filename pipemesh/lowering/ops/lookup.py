"""Lookups and order along a dim: one-hot, gather, top-k, argmax, cumulative sums."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import register
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.ops import elementwise
from pipemesh.lowering.ops.elementwise import cast, in_order
from pipemesh.lowering.ops.relayout import NO_NAMES, renamed_shape, summed, transpose
from pipemesh.lowering.ops.rows import Windows, first_rows
from pipemesh.lowering.tensor import Tensor, check_same_lowering, union_axes
from pipemesh.mesh import Dim, Shape


def local_start(lowering: Lowering, dim: Dim) -> tuple[Slices, int]:
    """Returns the first index (int32 scalars) and the length of each processor's part of a dim."""
    axis = lowering.rules.axis(dim.name)
    size = lowering.tensor_layout(Shape((dim,))).slice_shape[0]
    return first_rows(lowering, axis, Windows(dim.size, 0, size, size)), size


def _from_start(indices: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    """Subtracts `start` from indices, in a dtype that does not wrap around."""
    wide = indices if indices.dtype in (tf.int32, tf.int64) else tf.cast(indices, tf.int64)
    return wide - tf.cast(start, wide.dtype)


@register("lookup")
def one_hot(indices: Tensor, dim: Dim, dtype: tf.DType = tf.float32) -> Tensor:
    """Makes a new dim with a one at each index and zeros elsewhere.

    Args:
        indices: integers; an index outside of `[0, dim.size)` gives zeros only.
        dim: the new, last dim.
        dtype: the dtype of the result.

    Raises:
        ShapeError: `indices` has a dim of this name.
        LayoutError: the rules cannot split the result.
    """
    shape = Shape((*indices.shape.dims, dim))
    lowering = indices.lowering
    lowering.tensor_layout(shape)
    start, size = local_start(lowering, dim)
    slices = lowering.map(
        lambda at, begin: tf.one_hot(_from_start(at, begin), size, dtype=dtype),
        indices.slices,
        start,
    )
    return Tensor(lowering, slices, shape)


@register("lookup", "all_reduce", "reduce_scatter")
def gather(
    table: Tensor,
    indices: Tensor,
    dim: str,
    names: Mapping[str, str] = NO_NAMES,
    sparse: bool = False,
) -> Tensor:
    """Looks up rows of a table, for example of an embedding with a split vocabulary.

    Args:
        table: contains the dim `dim`.
        indices: integer positions along `dim`; a position outside of it gives a row of zeros. Dims
            that `table` has too are matched by name.
        dim: the name of the dim to look up in.
        names: new names of the result's dims, as for `einsum`.
        sparse: whether the gradient of each slice of the table may be `IndexedSlices`, with a row
            for each index. It is if `dim` comes first, and no sum over devices follows.

    Returns:
        The dims of `indices`, then those of `table` without `dim`.

    Raises:
        ShapeError: `table` has no such dim, `indices` has it, or a name has two sizes.
        LayoutError: the rules cannot split all dims together, or those of the result.
    """
    lowering = check_same_lowering([table, indices])
    looked_up = table.shape[dim]
    if dim in indices.shape.names:
        raise ShapeError(
            f"dim {dim!r} is what the indices count along, so they cannot have it; rename it in "
            f"the indices '{indices.shape}'"
        )
    lowering.tensor_layout(table.shape | indices.shape)
    if table.dtype == tf.bool:
        # Devices exchange numbers only.
        return cast(gather(cast(table, tf.int32), indices, dim, names), tf.bool)
    shared = table.shape & indices.shape
    own = table.shape.without(dim, *shared.names)
    rest = indices.shape - shared
    start, size = local_start(lowering, looked_up)
    axes = union_axes([table, indices])

    def local(rows: tf.Tensor, at: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
        order = [table.shape.index(n) for n in (*shared.names, dim, *own.names)]
        # Transposes even if the order stays: the gradient of a transposition is dense.
        rows = in_order(rows, order) if sparse else tf.transpose(rows, order)
        at = in_order(at, [indices.shape.index(n) for n in (*shared.names, *rest.names)])
        at = _from_start(at, begin)
        present = (at >= 0) & (at < size)
        if not size:
            return tf.zeros([*at.shape, *rows.shape[len(shared) + 1 :]], rows.dtype)
        inside = tf.where(present, at, tf.zeros_like(at))
        chosen = tf.gather(rows, inside, axis=len(shared), batch_dims=len(shared))
        mask = tf.reshape(present, [*present.shape, *[1] * len(own)])
        return tf.where(mask, chosen, tf.zeros_like(chosen))

    partial = lowering.map(local, table.vary(axes), indices.slices, start)
    axis = lowering.rules.axis(dim)
    shape = Shape((*shared.dims, *rest.dims, *own.dims))
    result = summed(lowering, partial, shape, [axis] if axis else [], names)
    order = renamed_shape(shape.select(*indices.shape.names, *own.names), names)
    return transpose(result, order.names)


@register("order", "all_gather", "slice")
def top_k(x: Tensor, dim: str, k: Dim) -> tuple[Tensor, Tensor]:
    """Returns the greatest elements along a dim, in descending order, and their indices.

    Of equal elements the one with the lower index comes first, as in `tf.math.top_k`. If the dim is
    split, each processor sends its `k` greatest elements. NaN counts as -inf; `tf.math.top_k`
    leaves its order undefined.

    Args:
        x: any numbers.
        k: the dim of the result that replaces it.

    Returns:
        Values and int32 indices.

    Raises:
        ShapeError: the dim has fewer elements.
        LayoutError: the rules cannot split the result.
    """
    if k.size > x.shape[dim].size:
        raise ShapeError(f"dim {dim!r} of '{x.shape}' has no {k.size} elements; lower '{k}'")
    lowering = x.lowering
    at = x.shape.index(dim)
    axis = x.layout.axes[at]
    shape = x.shape.replace(dim, k)
    result_axis = lowering.tensor_layout(shape).axes[at]
    start, size = local_start(lowering, x.shape[dim])
    last = len(x.shape) - 1

    def to_last(t: tf.Tensor) -> tf.Tensor:
        return tf.transpose(t, [*(i for i in range(last + 1) if i != at), at])

    def from_last(t: tf.Tensor) -> tf.Tensor:
        return tf.transpose(t, [*range(at), last, *range(at, last)])

    def greatest(rows: Slices, number: int) -> Slices:
        def local(t: tf.Tensor) -> tf.Tensor:
            if t.dtype.is_floating:
                t = tf.where(tf.math.is_nan(t), tf.constant(-math.inf, t.dtype), t)
            return tf.math.top_k(t, number).indices

        found = lowering.raw_map(local, rows)
        lowering.count([rows], found)
        return found

    def take(rows: Slices, places: Slices) -> Slices:
        return lowering.map(lambda t, i: tf.gather(t, i, batch_dims=last), rows, places)

    values = lowering.map(to_last, x.slices)
    places = greatest(values, min(k.size, size))
    values = take(values, places)
    indices = lowering.raw_map(lambda i, begin: i + begin, places, start)
    if axis is not None:
        # In the order of their indices, so that the lower index still comes first.
        values = lowering.all_gather(values, axis, last)
        indices = lowering.all_gather(indices, axis, last)
        places = greatest(values, k.size)
        values, indices = take(values, places), take(indices, places)
    values, indices = lowering.map(from_last, values), lowering.map(from_last, indices)
    if result_axis is not None:
        values = lowering.slice_along(values, result_axis, at)
        indices = lowering.slice_along(indices, result_axis, at)
    return Tensor(lowering, values, shape), Tensor(lowering, indices, shape)


@register("order", "all_reduce")
def argmax(x: Tensor, dim: str) -> Tensor:
    """Returns the int32 index of the greatest element along a dim; of equal ones, the lowest.

    NaN and -inf count as the dtype's lowest number, as in `tf.argmax`.

    Args:
        x: any numbers.
        dim: the name of the dim to remove.

    Raises:
        ShapeError: the dim is unknown or has no elements.
    """
    if not x.shape[dim].size:
        raise ShapeError(f"dim {dim!r} of '{x.shape}' has no elements, so none is the greatest")
    if x.dtype == tf.bool:
        x = elementwise.cast(x, tf.int32)
    lowering = x.lowering
    at = x.shape.index(dim)
    axis = x.layout.axes[at]
    rest = x.shape.without(dim)
    slices = x.slices
    if axis is not None:
        # As for `tf.argmax` on CPUs, NaN and -inf count as the lowest number.
        slices = lowering.raw_map(lambda t: tf.where(t > t.dtype.min, t, t.dtype.min), slices)
    places = lowering.raw_map(lambda t: tf.argmax(t, at, tf.int32), slices)
    lowering.count([slices], places)
    if axis is None:
        return Tensor(lowering, places, rest)
    start, _ = local_start(lowering, x.shape[dim])
    greatest = lowering.raw_map(lambda t: tf.reduce_max(t, at), slices)
    everywhere = lowering.all_reduce(greatest, [axis], "max")
    first = lowering.raw_map(
        lambda place, begin, mine, best: tf.where(
            tf.equal(mine, best), place + begin, tf.int32.max
        ),
        places,
        start,
        greatest,
        everywhere,
    )
    return Tensor(lowering, lowering.all_reduce(first, [axis], "min"), rest)


@register("order", "permute")
def cumsum(x: Tensor, dim: str, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Computes cumulative sums along a dim.

    If the dim is split over n processors, the sums of slices travel in 1 + log2(n) steps (Hillis
    and Steele, "Data Parallel Algorithms", 1986).

    Args:
        x: any numbers.
        exclusive: whether to leave an element out of its own sum.
        reverse: whether sums begin at the last element.
    """
    lowering = x.lowering
    at = x.shape.index(dim)
    axis = x.layout.axes[at]
    sums = lowering.map(lambda t: tf.cumsum(t, at, exclusive=exclusive, reverse=reverse), x.slices)
    if axis is None:
        return Tensor(lowering, sums, x.shape)
    up = -1 if reverse else 1
    totals = lowering.map(lambda t: tf.reduce_sum(t, at, keepdims=True), x.slices)
    before = lowering.shift(totals, axis, up, wrap=False)
    step = 1
    while step < lowering.mesh.size(axis):
        arrived = lowering.shift(before, axis, up * step, wrap=False)
        before = lowering.map(tf.add, before, arrived)
        step *= 2
    return Tensor(lowering, lowering.map(tf.add, sums, before), x.shape)
