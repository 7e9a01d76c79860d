"""Lookups: one-hot encoding and gather."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.ops.elementwise import cast, in_order
from pipemesh.lowering.ops.relayout import NO_NAMES, renamed_shape, summed, transpose
from pipemesh.lowering.registry import register
from pipemesh.lowering.tensor import Tensor, check_same_lowering, union_axes
from pipemesh.mesh import Dim, Shape


def local_start(lowering: Lowering, dim: Dim) -> tuple[Slices, int]:
    """Returns the first index (int32 scalars) and the length of each processor's part of a dim."""
    axis = lowering.rules.axis(dim.name)
    if axis is None:
        return lowering.raw_map(lambda: tf.constant(0)), dim.size
    size = lowering.tensor_layout(Shape((dim,))).slice_shape[0]
    return lowering.raw_map(lambda at: at * size, lowering.coordinate(axis)), size


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
def gather(table: Tensor, indices: Tensor, dim: str, names: Mapping[str, str] = NO_NAMES) -> Tensor:
    """Looks up rows of a table, for example of an embedding with a split vocabulary.

    Args:
        table: contains the dim `dim`.
        indices: integer positions along `dim`; a position outside of it gives a row of zeros. Dims
            that `table` has too are matched by name.
        dim: the name of the dim to look up in.
        names: new names of the result's dims, as for `einsum`.

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
        # Transposes even if the order stays: the gradient of a transposition is dense.
        rows = tf.transpose(rows, [table.shape.index(n) for n in (*shared.names, dim, *own.names)])
        at = in_order(at, [indices.shape.index(n) for n in (*shared.names, *rest.names)])
        at = _from_start(at, begin)
        present = (at >= 0) & (at < size)
        if not size:
            return tf.zeros([*at.shape, *rows.shape[len(shared) + 1 :]], rows.dtype)
        inside = tf.where(present, at, tf.zeros_like(at))
        found = tf.gather(rows, inside, axis=len(shared), batch_dims=len(shared))
        mask = tf.reshape(present, [*present.shape, *[1] * len(own)])
        return tf.where(mask, found, tf.zeros_like(found))

    partial = lowering.map(local, table.vary(axes), indices.slices, start)
    axis = lowering.rules.axis(dim)
    shape = Shape((*shared.dims, *rest.dims, *own.dims))
    found = summed(lowering, partial, shape, [axis] if axis else [], names)
    order = renamed_shape(shape.select(*indices.shape.names, *own.names), names)
    return transpose(found, order.names)
