"""Convolutions over named dims, which may be split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import register
from pipemesh.lowering.ops.elementwise import in_order
from pipemesh.lowering.ops.relayout import change_splits
from pipemesh.lowering.ops.rows import Windows, take_windows
from pipemesh.lowering.tensor import Tensor, check_same_dtype, check_same_lowering
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape
from pipemesh.text import nearest_text

# "SAME" or "VALID".
Padding = str
# One number for all dims, or a number for each dim name.
Steps = int | Mapping[str, int]
# Maps the number of dims to the operation and its gradients for images and filters.
_CONV: dict[int, tuple[Any, Any, Any]] = {
    2: (tf.raw_ops.Conv2D, tf.raw_ops.Conv2DBackpropInput, tf.raw_ops.Conv2DBackpropFilter),
    3: (tf.raw_ops.Conv3D, tf.raw_ops.Conv3DBackpropInputV2, tf.raw_ops.Conv3DBackpropFilterV2),
}


_register = register(
    "convolution",
    "permute",
    "all_reduce",
    "all_gather",
    arguments="""Args:
    x: the images, for example `"batch:8;rows:28;cols:28;in:3"`.
    filters: for example `"window_rows:3;window_cols:3;in:3;out:16"`.
    window: maps dims of `x` to the dims of `filters` that slide over them: for example, of two
        dims, `{"rows": "window_rows", "cols": "window_cols"}`.
    padding: `"SAME"` adds the zeros around `x` that keep its size at stride 1; `"VALID"` uses only
        windows that lie completely in `x`.
    strides: steps of the window: one number, or one for each name in `window`.
    dilations: steps within the window, in the same form.

Raises:
    ShapeError: the dims do not match, or a window is larger than `x`.
    LayoutError: the rules cannot split the result; change the rule in the message.""",
)


def _convolution(rank: int, what: str):  # Its type is that of `op`.
    def op(
        x: Tensor,
        filters: Tensor,
        window: Mapping[str, str],
        *,
        padding: Padding,
        strides: Steps = 1,
        dilations: Steps = 1,
    ) -> Tensor:
        lowering = check_same_lowering([x, filters])
        check_same_dtype([x, filters])
        _check_window(rank, x, filters, window, padding)
        _check_channels(x, filters, window)
        steps = _by_name("strides", strides, window)
        spread = _by_name("dilations", dilations, window)
        kernel = filters.shape.select(*window.values())
        rest = filters.shape.without(*kernel.names)
        shared = x.shape.without(*window) & rest
        out = rest - shared
        batch = x.shape.without(*window, *shared.names)
        shape, runs = windows_of(
            x.shape, filters.shape, window, padding, steps, spread, lowering.rules, lowering.mesh
        )
        layout = lowering.tensor_layout(shape)
        # All dims that meet in the matmuls; those of the window are whole.
        lowering.tensor_layout(Shape((*x.shape.dims, *out.dims)))

        whole = [
            None if name in kernel.names else axis
            for name, axis in zip(filters.shape.names, filters.layout.axes, strict=True)
        ]
        weights = change_splits(lowering, filters.slices, filters.layout.axes, whole)
        weight_axes = [axis for axis in whole if axis is not None]
        axes = tuple(dict.fromkeys([*x.split_axes, *weight_axes]))
        weights = lowering.vary(weights, [axis for axis in axes if axis not in weight_axes])
        rows = x.vary(axes)
        for name, run in runs.items():
            at = x.shape.index(name)
            rows = take_windows(lowering, rows, x.layout.axes[at], at, run)

        x_order = [x.shape.index(name) for name in (*batch.names, *window, *shared.names)]
        order = [filters.shape.index(name) for name in (*kernel.names, *shared.names, *out.names)]
        computed = (*batch.names, *window, *out.names)

        def local(image: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
            image, weight = in_order(image, x_order), in_order(weight, order)
            sizes, outs = static_sizes(image), static_sizes(weight)[rank + len(shared) :]
            batches, spatial = sizes[: len(batch)], sizes[len(batch) : len(batch) + rank]
            channels = math.prod(sizes[len(batch) + rank :])
            result = _convolve(
                tf.reshape(image, [math.prod(batches), *spatial, channels]),
                tf.reshape(weight, [*kernel.sizes, channels, math.prod(outs)]),
                [steps[name] for name in window],
                [spread[name] for name in window],
            )
            # For an empty batch TensorFlow returns an image of wrong sizes, which is empty too.
            slid = [layout.slice_shape[shape.index(name)] for name in window]
            result = tf.reshape(result, [*batches, *slid, *outs])
            return in_order(result, [computed.index(name) for name in shape.names])

        partial = lowering.map(local, rows, weights)
        summed = [axis for axis in axes if axis not in layout.split_axes]
        return Tensor(lowering, lowering.all_reduce(partial, summed), shape)

    op.__name__ = op.__qualname__ = f"conv{rank}d"
    op.__doc__ = what
    return _register(op)


conv1d = _convolution(1, "Convolves over one dim, as `tf.nn.conv1d` does; see `conv2d`.")
conv2d = _convolution(
    2,
    """Convolves over two dims, as `tf.nn.conv2d` does.

Dims that `x` and `filters` share are the channels to sum over; there must be at least one.
Further dims of `filters` are the channels of the result, its last dims. All other dims of `x`
are batch dims.

If a window slides over a split dim, each processor gets only the rows that its windows need
from its neighbours. The gradients of these rows go back and are added.

Strides and dilations are exact for split dims too. As for every tensor, the result's size must
be a multiple of the number of slices. Sizes are those of TensorFlow: ceil(size / stride) for
SAME, ceil((size - dilation * (window - 1)) / stride) for VALID.
""",
)
conv3d = _convolution(3, "Convolves over three dims, as `tf.nn.conv3d` does; see `conv2d`.")


def windows_of(
    x: Shape,
    filters: Shape,
    window: Mapping[str, str],
    padding: str,
    strides: Mapping[str, int],
    dilations: Mapping[str, int],
    rules: LayoutRules,
    mesh: Mesh,
) -> tuple[Shape, dict[str, Windows]]:
    """Returns a convolution's shape, and the rows it needs of each dim under a window."""
    rest = filters.without(*window.values())
    shared = x.without(*window) & rest
    shape = Shape((*x.without(*shared.names).dims, *(rest - shared).dims))
    # The rows that one window covers, and the row where the first one begins.
    reaches, starts = dict[str, int](), dict[str, int]()
    for name, filter_dim in window.items():
        reaches[name] = (filters[filter_dim].size - 1) * dilations[name] + 1
        size, starts[name] = _output(x[name], reaches[name], strides[name], padding)
        shape = shape.replace(name, Dim(name, size))
    layout = rules.tensor_layout(shape, mesh)
    runs: dict[str, Windows] = {}
    for name, reach in reaches.items():
        share, step = layout.slice_shape[shape.index(name)], strides[name]
        length = max(share - 1, 0) * step + reach
        runs[name] = Windows(x[name].size, starts[name], share * step, length)
    return shape, runs


def _convolve(
    image: tf.Tensor, weight: tf.Tensor, steps: list[int], spread: list[int]
) -> tf.Tensor:
    """Computes a plain VALID convolution with the batch first and the channels last."""
    if len(steps) == 1:
        image, weight = image[:, None], weight[None]
        return tf.squeeze(_convolve(image, weight, [1, *steps], [1, *spread]), 1)
    forward, to_image, to_weight = _CONV[len(steps)]
    how = {"padding": "VALID", "strides": [1, *steps, 1], "dilations": [1, *spread, 1]}

    # TensorFlow's own gradient computes the sizes, which cannot be compiled for a TPU.
    @custom_gradient
    def call(x: tf.Tensor, f: tf.Tensor) -> Any:
        def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            sizes, filter_sizes = tf.constant(static_sizes(x)), tf.constant(static_sizes(f))
            return (
                to_image(input_sizes=sizes, filter=f, out_backprop=upstream, **how),
                to_weight(input=x, filter_sizes=filter_sizes, out_backprop=upstream, **how),
            )

        return forward(input=x, filter=f, **how), grad

    return call(image, weight)


def _output(dim: Dim, reach: int, step: int, padding: str) -> tuple[int, int]:
    """Returns the size of the result, and the row where the first window begins."""
    if padding == "VALID":
        if reach > dim.size:
            raise ShapeError(
                f"a window of {reach} rows does not fit into dim '{dim}'; use a smaller window or "
                "dilation, or padding='SAME'"
            )
        return (dim.size - reach) // step + 1, 0
    size = -(-dim.size // step)
    zeros = max((size - 1) * step + reach - dim.size, 0)
    return size, -(zeros // 2)


def _by_name(what: str, steps: Steps, window: Mapping[str, str]) -> dict[str, int]:
    numbers = {name: steps for name in window} if isinstance(steps, int) else dict(steps)
    if set(numbers) != set(window) or min(numbers.values()) < 1:
        raise ShapeError(
            f"{what} are {steps}; give one number of at least 1, or one for each of "
            f"{', '.join(window)}"
        )
    return numbers


def _check_window(
    rank: int, x: Tensor, filters: Tensor, window: Mapping[str, str], padding: str
) -> None:
    if padding not in ("SAME", "VALID"):
        raise ShapeError(f"padding is {padding!r}; it is 'SAME' or 'VALID'")
    if len(window) != rank:
        raise ShapeError(f"conv{rank}d slides over {rank} dims, but {dict(window)} has not as many")
    x.shape.select(*window)
    filters.shape.select(*window.values())
    both = [name for name in window.values() if name in x.shape.names]
    both += [name for name in window if name in filters.shape.names]
    if both:
        raise ShapeError(
            f"dim {both[0]!r} is in '{x.shape}' and in '{filters.shape}', but the dims that slide "
            "and those that they slide over have names of their own; rename one of the two"
        )


def _check_channels(x: Tensor, filters: Tensor, window: Mapping[str, str]) -> None:
    """Rejects misspelt channels, which would become a batch dim and a new channel."""
    rest = x.shape.without(*window)
    channels = filters.shape.without(*window.values())
    if not rest & channels:
        near = "".join(f" ({name!r}{nearest_text(name, rest.names)})" for name in channels.names)
        raise ShapeError(
            f"the images '{x.shape}' and the filters '{filters.shape}' share no dim to sum over, "
            f"their channels{near}; give both the dim, of size 1 if there is one channel"
        )
