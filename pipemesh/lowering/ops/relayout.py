"""Transfer into the mesh and out of it, and new names, orders and shapes of dims."""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import as_shape, register
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim, Shape


@register("transfer")
def import_tensor(lowering: Lowering, tensor: Any, shape: Shape | str) -> Tensor:
    """Cuts a whole tensor into slices.

    Args:
        lowering: the lowering of the new tensor.
        tensor: a tensor or array with the sizes of `shape`. Sizes that TensorFlow does not know yet
            are checked when the program runs. In SIMD every core has the whole tensor.
        shape: names for its dims, for example `"batch:100;io:3"`.

    Raises:
        ShapeError: the sizes differ.
        LayoutError: the rules cannot split the tensor.
    """
    shape = as_shape(shape)
    return Tensor(lowering, lowering.import_tensor(tensor, lowering.tensor_layout(shape)), shape)


@register("transfer", "all_gather")
def export_tensor(x: Tensor) -> tf.Tensor:
    """Joins the slices to the whole tensor, on the first device or on every core."""
    x.lowering.warn_of_misspelt_rules()
    return x.lowering.export_tensor(x.slices, x.layout)


Axes = Sequence[str | None]
NO_NAMES: Mapping[str, str] = types.MappingProxyType({})


def change_splits(lowering: Lowering, x: Slices, old: Axes, new: Axes) -> Slices:
    """Moves data from the splits `old` to the splits `new`, each the axis of every dim."""
    # An axis that moves to another dim is one all-to-all. An axis that is no longer used is one
    # all-gather, and a newly used one a slice.
    axes = list(old)
    for dim, axis in enumerate(old):
        if axis is not None and axis not in new:
            x = lowering.all_gather(x, axis, dim)
            axes[dim] = None
    while True:
        moves = [
            (axis, source, list(new).index(axis))
            for source, axis in enumerate(axes)
            if axis is not None and new[source] != axis
        ]
        if not moves:
            break
        free = [move for move in moves if axes[move[2]] is None]
        if free:
            axis, source, target = free[0]
            x = lowering.all_to_all(x, axis, split_dim=target, concat_dim=source)
            axes[source], axes[target] = None, axis
        else:
            # The axes form a cycle: one of them leaves it here and is sliced below.
            axis, source, _ = moves[0]
            x = lowering.all_gather(x, axis, source)
            axes[source] = None
    for dim, axis in enumerate(new):
        if axis is not None and axes[dim] is None:
            x = lowering.slice_along(x, axis, dim)
    return x


def renamed_shape(shape: Shape, names: Mapping[str, str]) -> Shape:
    """Returns a shape with renamed dims, or raises a ShapeError for an unknown or repeated name."""
    for name in names:
        shape.index(name)
    return Shape(tuple(Dim(names.get(dim.name, dim.name), dim.size) for dim in shape))


def summed(
    lowering: Lowering,
    partial: Slices,
    shape: Shape,
    axes: Sequence[str],
    names: Mapping[str, str],
) -> Tensor:
    """Sums partial results of `shape` over axes, and renames its dims."""
    if not names:
        return Tensor(lowering, lowering.all_reduce(partial, axes), shape)
    result = renamed_shape(shape, names)
    old, new = (lowering.tensor_layout(of).axes for of in (shape, result))
    return Tensor(lowering, sum_to_splits(lowering, partial, axes, old, new), result)


def sum_to_splits(
    lowering: Lowering, partial: Slices, axes: Sequence[str], old: Axes, new: Axes
) -> Slices:
    """Sums over axes, and moves data from the splits `old` to the splits `new`."""
    # An axis that is summed over and splits a dim in `new` is one reduce-scatter.
    axes_now, rest = list(old), []
    for axis in axes:
        dim = list(new).index(axis) if axis in new else None
        if dim is None or axes_now[dim] is not None:
            rest.append(axis)
        else:
            partial = lowering.reduce_scatter(partial, axis, dim)
            axes_now[dim] = axis
    return change_splits(lowering, lowering.all_reduce(partial, rest), axes_now, new)


def gather_to_meet(
    lowering: Lowering, x: Slices, old: Axes, new: Axes, met: Collection[str]
) -> tuple[Slices, list[str]]:
    """Moves data from the splits `old` to `new`, before it meets values that differ along the axes
    `met`; returns the slices, and the axes along which they may differ now.
    """
    # A split over one of `met` that ends is an all-gather whose gradient is a reduce-scatter.
    axes_now = list(old)
    gathered = [axis for axis in old if axis in met and axis not in new]
    for axis in gathered:
        dim = axes_now.index(axis)
        x = lowering.gather_varied(x, str(axis), dim)
        axes_now[dim] = None
    return change_splits(lowering, x, axes_now, new), list(map(str, gathered))


@register("relayout")
def transpose(x: Tensor, dims: Sequence[str]) -> Tensor:
    """Reorders the dims.

    Args:
        dims: all its names, in the new order.

    Raises:
        ShapeError: `dims` are not the names of `x`.
    """
    if sorted(dims) != sorted(x.shape.names):
        raise ShapeError(f"{list(dims)} is no order of the dims of '{x.shape}'")
    if tuple(dims) == x.shape.names:
        return x
    order = [x.shape.index(name) for name in dims]
    slices = x.lowering.map(lambda slice_: tf.transpose(slice_, order), x.slices)
    return Tensor(x.lowering, slices, x.shape.select(*dims))


@register("relayout", "all_to_all", "all_gather", "slice")
def rename(x: Tensor, names: Mapping[str, str]) -> Tensor:
    """Renames dims, which may change the layout.

    Args:
        names: new names by old ones; dims that are left out keep their names.

    Raises:
        ShapeError: an old name is unknown, or a name occurs twice in the result.
        LayoutError: the rules cannot split the result.
    """
    shape = renamed_shape(x.shape, names)
    new = x.lowering.tensor_layout(shape).axes
    return Tensor(x.lowering, change_splits(x.lowering, x.slices, x.layout.axes, new), shape)


def leading_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first dims of shortest runs of old and new dims with equal products; sizes are
    above 0.
    """
    # Runs begin where the products of all dims before are equal. Dims of size 1 lead no run.
    old_dims, new_dims = (
        {math.prod(sizes[:dim]): dim for dim, size in enumerate(sizes) if size != 1}
        for sizes in (old, new)
    )
    return [(dim, new_dims[before]) for before, dim in old_dims.items() if before in new_dims]


def _meeting_axes(lowering: Lowering, x: Tensor, shape: Shape) -> tuple[list[str | None], ...]:
    """Returns the axes of old and new dims at the moment of the local reshape."""
    # Within a run of dims only a split of the leading dim survives: it cuts the elements into
    # contiguous blocks. An axis that is needed before or after stays there if possible.
    old_sizes, new_sizes = x.shape.sizes, shape.sizes
    old_axes, new_axes = x.layout.axes, lowering.tensor_layout(shape).axes
    before: list[str | None] = [None] * len(old_sizes)
    after: list[str | None] = [None] * len(new_sizes)
    if 0 in old_sizes:
        return before, after
    leading = leading_dims(old_sizes, new_sizes)
    # First axes that need not move at all, then those that move on one side only.
    for needs in (2, 1):
        for lead, target in leading:
            if before[lead] is not None:
                continue
            candidates = [old_axes[lead], new_axes[target]]
            for axis in candidates:
                if axis is None or axis in before or candidates.count(axis) < needs:
                    continue
                parts = lowering.mesh.size(axis)
                used = axis in old_axes and axis in new_axes
                if used and not old_sizes[lead] % parts and not new_sizes[target] % parts:
                    before[lead] = after[target] = axis
                    break
    return before, after


@register("relayout", "all_to_all", "all_gather", "slice")
def reshape(x: Tensor, shape: Shape | str) -> Tensor:
    """Reshapes the elements in row-major order.

    Splits of leading dims stay in place. A split that moves to another dim is one all-to-all.

    Args:
        shape: the new shape, with the same number of elements.

    Raises:
        ShapeError: the number of elements differs.
        LayoutError: the rules cannot split the result.
    """
    shape = as_shape(shape)
    if shape.size != x.shape.size:
        raise ShapeError(
            f"'{x.shape}' has {x.shape.size} elements and '{shape}' {shape.size}; "
            "a reshape keeps all elements"
        )
    lowering = x.lowering
    layout = lowering.tensor_layout(shape)
    before, after = _meeting_axes(lowering, x, shape)
    slices = change_splits(lowering, x.slices, x.layout.axes, before)
    sizes = [
        size if axis is None else size // lowering.mesh.size(axis)
        for size, axis in zip(shape.sizes, after, strict=True)
    ]
    slices = lowering.map(lambda slice_: tf.reshape(slice_, sizes), slices)
    return Tensor(lowering, change_splits(lowering, slices, after, layout.axes), shape)
