"""Order of elements along a dim: top-k, argmax, cumulative sums."""

from __future__ import annotations

import math

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.ops import elementwise
from pipemesh.lowering.ops.lookup import local_start
from pipemesh.lowering.registry import register
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim


@register("order", "all_gather", "slice")
def top_k(x: Tensor, dim: str, k: Dim) -> tuple[Tensor, Tensor]:
    """Returns the greatest elements along a dim, in descending order, and their indices.

    Of equal elements the one with the lower index comes first, as in `tf.math.top_k`. If the dim is
    split, each processor sends its `k` greatest elements. NaN counts as -inf; `tf.math.top_k`
    leaves its order undefined.

    Args:
        x: any numbers.
        dim: the name of the dim.
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

        return lowering.raw_map(local, rows)

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
    places = lowering.raw_map(lambda t: tf.argmax(t, at, tf.int32), x.slices)
    if axis is None:
        return Tensor(lowering, places, rest)
    start, _ = local_start(lowering, x.shape[dim])

    def value(t: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
        last = [*(i for i in range(len(x.shape)) if i != at), at]
        found = tf.gather(tf.transpose(t, last), place, batch_dims=len(rest))
        # As for `tf.argmax`, NaN and -inf count as the lowest number.
        return tf.where(found > found.dtype.min, found, found.dtype.min)

    greatest = lowering.raw_map(value, x.slices, places)
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
        dim: the name of the dim.
        exclusive: whether to leave an element out of its own sum.
        reverse: whether sums begin at the last element.

    Raises:
        ShapeError: the name is unknown.
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
