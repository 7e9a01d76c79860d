"""Pooling and upsampling of named dims, which may be split."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.operations import sum_in_order
from pipemesh.lowering.arguments import register
from pipemesh.lowering.ops.convolution import (
    Padding,
    Steps,
    check_padding,
    steps_by_name,
    windows_of,
)
from pipemesh.lowering.ops.rows import fill_outside, first_rows, take_windows
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim

_register = register(
    "pooling",
    "permute",
    arguments="""If a window slides over a split dim, each processor gets only the rows that its
windows need from its neighbours. Sizes are those of `conv2d`.

Args:
    x: a tensor.
    window: maps dims to the sizes of the window, for example `{"rows": 2, "cols": 2}`.
    padding: `"SAME"` or `"VALID"`, as for `conv2d`; rows outside of `x` do not count.
    strides: steps of the window: one number, or one for each name in `window`; by default the
        sizes of the window.

Raises:
    ShapeError: a window is larger than `x`, or a number is below 1.
    LayoutError: the rules cannot split the result; change the rule in the message.""",
)


@_register
def max_pool(
    x: Tensor, window: Mapping[str, int], *, padding: Padding, strides: Steps | None = None
) -> Tensor:
    """Takes the greatest elements of windows over any dims, as `tf.nn.max_pool` does.

    Of equal elements, the first one in a window gets the gradient.
    """
    return _pooled(x, window, padding, strides, greatest=True)


@_register
def avg_pool(
    x: Tensor, window: Mapping[str, int], *, padding: Padding, strides: Steps | None = None
) -> Tensor:
    """Averages the elements of windows over any dims, as `tf.nn.avg_pool` does."""
    return _pooled(x, window, padding, strides, greatest=False)


def _pooled(
    x: Tensor, window: Mapping[str, int], padding: Padding, strides: Steps | None, greatest: bool
) -> Tensor:
    check_padding(padding)
    sizes = steps_by_name("sizes of the window", window, window)
    steps = sizes if strides is None else steps_by_name("strides", strides, window)
    # TensorFlow's kernels lack some dtypes and numbers of dims. One dim after the other needs fewer
    # operations than whole windows. The last dim comes first: so the first of equal elements in
    # row-major order gets the gradient.
    for name in sorted(window, key=x.shape.index, reverse=True):
        x = _pooled_along(x, name, sizes[name], steps[name], padding, greatest)
    return x


def _pooled_along(
    x: Tensor, name: str, size: int, step: int, padding: Padding, greatest: bool
) -> Tensor:
    lowering, at = x.lowering, x.shape.index(name)
    axis = x.layout.axes[at]
    shape, runs = windows_of(
        x.shape, x.shape, {name: size}, padding, {name: step}, lowering.rules, lowering.mesh
    )
    sizes = lowering.tensor_layout(shape).slice_shape
    run, share = runs[name], sizes[at]
    rows = take_windows(lowering, x.slices, axis, at, run)
    if greatest and padding == "SAME":
        least = x.dtype.min if x.dtype.is_integer else -math.inf
        rows = fill_outside(lowering, rows, axis, at, run, least)

    def pool(rows: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        before = [slice(None)] * at
        parts = [rows[(*before, slice(i, i + share * step, step))] for i in range(size)]
        if greatest:
            return functools.reduce(tf.maximum, parts)
        begin = first + step * tf.range(share)
        number = tf.minimum(begin + size, run.size) - tf.maximum(begin, 0)
        number = tf.reshape(number, [share, *[1] * (len(shape) - at - 1)])
        return sum_in_order(parts) / tf.cast(number, x.dtype)

    flops = pooling_flops(size, sizes)
    firsts = first_rows(lowering, axis, run)
    return Tensor(lowering, lowering.map(pool, rows, firsts, flops=flops), shape)


def pooling_flops(window: int, sizes: Sequence[int]) -> int:
    """Returns the flops of pooling along one dim, given the sizes of the result."""
    return window * math.prod(sizes)


@register("pooling")
def upsample(x: Tensor, factors: Mapping[str, int]) -> Tensor:
    """Repeats each row of dims, which keep their names: upsampling to the nearest row.

    Args:
        x: a tensor.
        factors: maps dims to numbers of times, for example `{"rows": 2, "cols": 2}`.

    Raises:
        ShapeError: a factor is below 1.
    """
    lowering = x.lowering
    for name, times in steps_by_name("factors", factors, factors).items():
        at = x.shape.index(name)
        shape = x.shape.replace(name, Dim(name, x.shape[name].size * times))
        sizes = lowering.tensor_layout(shape).slice_shape

        def repeated(t: tf.Tensor, at: int = at, times: int = times, sizes=sizes) -> tf.Tensor:
            return tf.reshape(tf.stack([t] * times, at + 1), sizes)

        x = Tensor(lowering, lowering.map(repeated, x.slices), shape)
    return x
