"""Reductions and softmax over named dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import F, register
from pipemesh.lowering.ops import elementwise
from pipemesh.lowering.registry import OPS
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Shape

Dims = str | Sequence[str] | None
_EXTREMES = {"max": tf.reduce_max, "min": tf.reduce_min}


def _register(kind: str) -> Callable[[F], F]:
    return register(
        "reduction",
        "all_reduce",
        arguments=f"""Args:
    x: {kind}.
    dims: the names of the dims to reduce; None for all.

Raises:
    ShapeError: a name is unknown.""",
    )


def _reduction(x: Tensor, dims: Dims) -> tuple[Shape, list[int], list[str]]:
    """Returns the dims that stay, and the positions and axes of the others."""
    removed = x.shape if dims is None else x.shape.select(*dims)
    positions = [x.shape.index(name) for name in removed.names]
    axes = [axis for position in positions if (axis := x.layout.axes[position]) is not None]
    return x.shape - removed, positions, axes


@_register("any numbers")
def reduce_sum(x: Tensor, dims: Dims = None) -> Tensor:
    """Sums over dims; 0 over nothing."""
    kept, at, axes = _reduction(x, dims)
    partial = x.lowering.map(lambda slice_: tf.reduce_sum(slice_, at), x.slices)
    return Tensor(x.lowering, x.lowering.all_reduce(partial, axes), kept)


@_register("floating numbers")
def reduce_mean(x: Tensor, dims: Dims = None) -> Tensor:
    """Averages over dims; NaN over nothing."""
    if not x.dtype.is_floating:
        raise ShapeError(f"the mean of {x.dtype.name} numbers is not one of them; cast them first")
    total = reduce_sum(x, dims)
    size = math.prod(dim.size for dim in x.shape - total.shape)
    slices = x.lowering.map(lambda slice_: slice_ / tf.cast(size, slice_.dtype), total.slices)
    return Tensor(x.lowering, slices, total.shape)


def widened(x: Tensor) -> Tensor:
    """Converts half precision to float32, in which long sums neither stall nor overflow."""
    return elementwise.cast(x, tf.float32) if x.dtype.size < tf.float32.size else x


def extreme(x: Tensor, dims: Dims, op: str) -> Tensor:
    """Computes the greatest or smallest elements, without gradient."""
    kept, at, axes = _reduction(x, dims)
    partial = x.lowering.map(lambda s: tf.stop_gradient(_EXTREMES[op](s, at)), x.slices)
    return Tensor(x.lowering, x.lowering.all_reduce(partial, axes, op), kept)


def _reduce_extreme(x: Tensor, dims: Dims, op: str) -> Tensor:
    kept, at, axes = _reduction(x, dims)
    lowering = x.lowering
    if not x.dtype.is_floating:
        return extreme(x, dims, op)
    if lowering.group_size(axes) == 1:
        return Tensor(lowering, lowering.map(lambda s: _EXTREMES[op](s, at), x.slices), kept)
    result = extreme(x, dims, op)

    def is_extreme(slice_: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        return tf.stop_gradient(tf.cast(tf.equal(slice_, _expand(value, at)), slice_.dtype))

    # As in TensorFlow, equal elements share the gradient.
    chosen = lowering.map(is_extreme, x.slices, result.slices)
    count = lowering.all_reduce(lowering.map(lambda s: tf.reduce_sum(s, at), chosen), axes)

    def share(grad: tf.Tensor, here: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return here * _expand(grad / number, at)

    slices = lowering.with_gradient(
        lambda _: lowering.raw_map(tf.identity, result.slices),
        # A value that is equal along the axes meets elements that are not.
        lambda grad: [lowering.map(share, lowering.vary(grad, axes), chosen, count)],
        x.slices,
    )
    return Tensor(lowering, slices, kept)


def _expand(tensor: tf.Tensor, at: Sequence[int]) -> tf.Tensor:
    """Inserts dims of size 1 where dims were reduced."""
    for position in sorted(at):
        tensor = tf.expand_dims(tensor, position)
    return tensor


@_register("any numbers")
def reduce_max(x: Tensor, dims: Dims = None) -> Tensor:
    """Computes the greatest elements over dims; the dtype's lowest value (-inf) over nothing."""
    return _reduce_extreme(x, dims, "max")


@_register("any numbers")
def reduce_min(x: Tensor, dims: Dims = None) -> Tensor:
    """Computes the smallest elements over dims; the dtype's highest value (inf) over nothing."""
    return _reduce_extreme(x, dims, "min")


@_register("floating numbers")
def reduce_logsumexp(x: Tensor, dims: Dims = None) -> Tensor:
    """Computes logarithms of sums of exponentials over dims, without overflow; -inf over nothing.

    Half precision is computed in float32.
    """
    dtype, x = x.dtype, widened(x)
    _, at, axes = _reduction(x, dims)
    lowering = x.lowering
    greatest = extreme(x, dims, "max")
    top = lowering.map(
        lambda value: tf.where(tf.math.is_finite(value), value, tf.zeros_like(value)),
        greatest.slices,
    )
    partial = lowering.map(
        lambda s, value: tf.reduce_sum(tf.exp(s - _expand(value, at)), at), x.slices, top
    )
    total = lowering.all_reduce(partial, axes)
    slices = lowering.map(lambda s, value: tf.math.log(s) + value, total, top)
    return elementwise.cast(Tensor(lowering, slices, greatest.shape), dtype)


def _reduce_bools(x: Tensor, dims: Dims, reduce: Callable[..., tf.Tensor], op: str) -> Tensor:
    kept, at, axes = _reduction(x, dims)
    lowering = x.lowering
    # Devices exchange numbers only.
    partial = lowering.map(lambda s: tf.cast(reduce(s, at), tf.int32), x.slices)
    total = lowering.all_reduce(partial, axes, op)
    return Tensor(lowering, lowering.map(lambda s: tf.cast(s, tf.bool), total), kept)


@_register("booleans")
def reduce_all(x: Tensor, dims: Dims = None) -> Tensor:
    """Returns whether all booleans over dims are true; true over nothing."""
    return _reduce_bools(x, dims, tf.reduce_all, "min")


@_register("booleans")
def reduce_any(x: Tensor, dims: Dims = None) -> Tensor:
    """Returns whether any boolean over dims is true; false over nothing."""
    return _reduce_bools(x, dims, tf.reduce_any, "max")


@register("softmax", "all_reduce")
def softmax(x: Tensor, dims: Dims) -> Tensor:
    """Divides exponentials by their sum over dims.

    Half precision is computed in float32: a sum of 65,520 ones is infinite in float16.

    Args:
        x: floating numbers.
        dims: the names of the dims over which the result sums to 1.
    """
    # Softmax does not change when a constant is subtracted, so the maximum needs no gradient.
    wide = widened(x)
    raised = elementwise.exp(elementwise.subtract(wide, extreme(wide, dims, "max")))
    return elementwise.cast(elementwise.divide(raised, reduce_sum(raised, dims)), x.dtype)


@register("softmax", "all_reduce")
def log_softmax(x: Tensor, dims: Dims) -> Tensor:
    """Computes logarithms of the softmax over dims, without underflow.

    Args:
        x: floating numbers.
        dims: the names of the dims over which the exponentials of the result sum to 1.
    """
    wide = widened(x)
    return elementwise.cast(elementwise.subtract(wide, reduce_logsumexp(wide, dims)), x.dtype)


# `ops` has these names.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, op in OPS.items() if op.group in ("reduction", "softmax")
]
