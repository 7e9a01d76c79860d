"""Convolutions over named dims, which may be split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import register
from pipemesh.lowering.ops.einsum import product_flops
from pipemesh.lowering.ops.elementwise import in_order
from pipemesh.lowering.ops.relayout import change_splits
from pipemesh.lowering.ops.rows import Windows, rows_of, take_windows
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
        if len(window) != rank:
            raise ShapeError(
                f"conv{rank}d slides over {rank} dims, but {dict(window)} has not as many"
            )
        return _slide(x, filters, window, padding, strides, dilations, transposed=False)

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


@_register
def conv_transpose(
    x: Tensor,
    filters: Tensor,
    window: Mapping[str, str],
    *,
    padding: Padding,
    strides: Steps = 1,
    dilations: Steps = 1,
) -> Tensor:
    """Computes the transpose of a convolution over one to three dims, as `tf.nn.conv_transpose`.

    It is the gradient of a convolution by its images: with strides it enlarges them. Dims that `x`
    and `filters` share are the channels to sum over, as for `conv2d`.

    Sizes are size * stride for SAME; for VALID they are larger by the rows that a window, with its
    dilations, has above the stride.
    """
    if not 1 <= len(window) <= 3:
        raise ShapeError(f"conv_transpose slides over 1 to 3 dims, but window is {dict(window)}")
    return _slide(x, filters, window, padding, strides, dilations, transposed=True)


def _slide(
    x: Tensor,
    filters: Tensor,
    window: Mapping[str, str],
    padding: Padding,
    strides: Steps,
    dilations: Steps,
    transposed: bool,
) -> Tensor:
    """Computes a convolution, or its transpose."""
    lowering = check_same_lowering([x, filters])
    check_same_dtype([x, filters])
    check_padding(padding)
    _check_window(x, filters, window)
    _check_channels(x, filters, window)
    steps = steps_by_name("strides", strides, window)
    spread = steps_by_name("dilations", dilations, window)
    rank = len(window)
    kernel = filters.shape.select(*window.values())
    rest = filters.shape.without(*kernel.names)
    shared = x.shape.without(*window) & rest
    out = rest - shared
    batch = x.shape.without(*window, *shared.names)
    reaches = reaches_of(filters.shape, window, spread)
    shape = Shape((*x.shape.without(*shared.names).dims, *out.dims))
    mesh, rules = lowering.mesh, lowering.rules
    kept: dict[str, Kept] = {}
    if transposed:
        shape, runs, kept = enlarged(x.shape, shape, reaches, padding, steps, rules, mesh)
    else:
        shape, runs = windows_of(x.shape, shape, reaches, padding, steps, rules, mesh)
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
    channels = (*out.names, *shared.names) if transposed else (*shared.names, *out.names)
    order = [filters.shape.index(name) for name in (*kernel.names, *channels)]
    computed = (*batch.names, *window, *out.names)
    share = {dim.name: size for dim, size in zip(shape, layout.slice_shape, strict=True)}
    slid = [kept[name].length if transposed else share[name] for name in window]
    outs = [share[name] for name in out.names]

    def local(image: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        image, weight = in_order(image, x_order), in_order(weight, order)
        sizes = static_sizes(image)
        batches, spatial = sizes[: len(batch)], sizes[len(batch) : len(batch) + rank]
        ends = [math.prod(sizes[len(batch) + rank :]), math.prod(outs)]
        found = [*batches, *slid, *outs]
        if not math.prod(sizes) * math.prod(found):
            result = _nothing(found)(image, weight)
            return in_order(result, [computed.index(name) for name in shape.names])
        result = _convolve(
            tf.reshape(image, [math.prod(batches), *spatial, ends[0]]),
            tf.reshape(weight, [*kernel.sizes, *(reversed(ends) if transposed else ends)]),
            [steps[name] for name in window],
            [spread[name] for name in window],
            [kept[name].whole for name in window] if transposed else None,
        )
        for at, part in enumerate(kept.values(), 1):
            result = rows_of(result, at, part.begin, part.length)
        result = tf.reshape(result, found)
        return in_order(result, [computed.index(name) for name in shape.names])

    # Each row of the image, or of the result, meets all weights that this processor has of it.
    met = math.prod(static_sizes(rows[0])) if transposed else math.prod(layout.slice_shape)
    ends = [outs, [static_sizes(rows[0])[x.shape.index(name)] for name in shared.names]]
    flops = convolution_flops(kernel, math.prod(ends[not transposed]), met)
    result = lowering.map(local, rows, weights, flops=flops)
    result = lowering.all_reduce(result, [axis for axis in axes if axis not in layout.split_axes])
    for name, part in kept.items():
        if part.length != share[name]:
            at, parts = shape.index(name), shape[name].size // max(share[name], 1)
            moved = Windows(part.length * parts, 0, share[name], share[name])
            result = take_windows(lowering, result, layout.axes[at], at, moved)
    return Tensor(lowering, result, shape)


def convolution_flops(kernel: Shape, channels: int, elements: int) -> int:
    """Returns the flops of a convolution: of so many elements of the result, each summed over the
    channels of the image; if transposed, of elements of the image, for channels of the result.
    """
    return product_flops([kernel.size, channels, elements])


def reaches_of(
    filters: Shape, window: Mapping[str, str], dilations: Mapping[str, int]
) -> dict[str, int]:
    """Returns the number of rows that one window covers, of each dim that it slides over."""
    return {
        name: (filters[filter_dim].size - 1) * dilations[name] + 1
        for name, filter_dim in window.items()
    }


def windows_of(
    x: Shape,
    shape: Shape,
    reaches: Mapping[str, int],
    padding: str,
    strides: Mapping[str, int],
    rules: LayoutRules,
    mesh: Mesh,
) -> tuple[Shape, dict[str, Windows]]:
    """Returns the shape after windows slid over dims, and the rows needed of each dim under one.

    In the given `shape` these dims still have the sizes that they have in `x`.
    """
    starts = dict[str, int]()  # the row where the first window begins
    for name, reach in reaches.items():
        size, starts[name] = _output(x[name], reach, strides[name], padding)
        shape = shape.replace(name, Dim(name, size))
    layout = rules.tensor_layout(shape, mesh)
    runs: dict[str, Windows] = {}
    for name, reach in reaches.items():
        share, step = layout.slice_shape[shape.index(name)], strides[name]
        length = max(share - 1, 0) * step + reach
        runs[name] = Windows(x[name].size, starts[name], share * step, length)
    return shape, runs


@dataclasses.dataclass(frozen=True)
class Kept:
    """The rows of a transposed convolution that a processor computes of its run of rows."""

    whole: int  # the number of rows of which some are kept
    begin: int
    length: int


def enlarged(
    x: Shape,
    shape: Shape,
    reaches: Mapping[str, int],
    padding: str,
    strides: Mapping[str, int],
    rules: LayoutRules,
    mesh: Mesh,
) -> tuple[Shape, dict[str, Windows], dict[str, Kept]]:
    """Returns the shape of a transposed convolution, the rows that it needs, and those it keeps."""
    for name, reach in reaches.items():
        more = max(reach - strides[name], 0) if padding == "VALID" else 0
        shape = shape.replace(name, Dim(name, x[name].size * strides[name] + more))
    layout = rules.tensor_layout(shape, mesh)
    runs, kept = dict[str, Windows](), dict[str, Kept]()
    for name, reach in reaches.items():
        step, size = strides[name], shape[name]
        # Row r of `x` reaches the rows of the result from r * step + start on.
        start = 0 if padding == "VALID" else _output(size, reach, step, padding)[1]
        # Each processor computes whole steps, so that all of them need rows at the same offsets.
        length = -(-layout.slice_shape[shape.index(name)] // step) * step
        first = -((start + reach - 1) // step)
        end = (length - 1 - start) // step + 1
        runs[name] = Windows(x[name].size, first, length // step, end - first)
        begin = -start - first * step
        whole = max((end - first - 1) * step + reach, begin + length)
        kept[name] = Kept(whole, begin, length)
    return shape, runs, kept


def _nothing(sizes: Sequence[int]) -> Callable[..., tf.Tensor]:
    """Returns the convolution that has no elements, or sums of none: zeros of these sizes.

    In graphs TensorFlow has no shape for windows that slide over nothing.
    """

    @custom_gradient
    def call(x: tf.Tensor, f: tf.Tensor) -> Any:
        return tf.zeros(sizes, x.dtype), lambda _: (tf.zeros_like(x), tf.zeros_like(f))

    return call


def _convolve(
    image: tf.Tensor,
    weight: tf.Tensor,
    steps: list[int],
    spread: list[int],
    enlarged: list[int] | None,
) -> tf.Tensor:
    """Computes a plain VALID convolution with the batch first and the channels last.

    Given the sizes of an enlarged image, it computes the transpose.
    """
    if len(steps) == 1:
        image, weight = image[:, None], weight[None]
        enlarged = enlarged and [1, *enlarged]
        return tf.squeeze(_convolve(image, weight, [1, *steps], [1, *spread], enlarged), 1)
    if max(spread) > 1:
        # On most CPUs TensorFlow lacks gradients of dilated filters, and in graphs it computes
        # wrong sizes for unequal dilations of three dims.
        if max(steps) == 1:
            return _by_phases(image, weight, spread, enlarged is not None)
        return _convolve(image, _with_zeros(weight, spread), steps, [1] * len(steps), enlarged)
    forward, to_image, to_weight = _CONV[len(steps)]
    how = {"padding": "VALID", "strides": [1, *steps, 1]}

    # TensorFlow's own gradient computes the sizes, which cannot be compiled for a TPU.
    @custom_gradient
    def call(x: tf.Tensor, f: tf.Tensor) -> Any:
        sizes, filter_sizes = static_sizes(x), static_sizes(f)
        if enlarged:
            sizes = [sizes[0], *enlarged, filter_sizes[-2]]

        def small(image: tf.Tensor) -> tf.Tensor:
            return forward(input=image, filter=f, **how)

        def large(image: tf.Tensor) -> tf.Tensor:
            return to_image(input_sizes=tf.constant(sizes), filter=f, out_backprop=image, **how)

        def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            images = (upstream, x) if enlarged else (x, upstream)
            to_x = small if enlarged else large
            return to_x(upstream), to_weight(
                input=images[0],
                filter_sizes=tf.constant(filter_sizes),
                out_backprop=images[1],
                **how,
            )

        return (large if enlarged else small)(x), grad

    return call(image, weight)


def _by_phases(
    image: tf.Tensor, weight: tf.Tensor, spread: list[int], is_transposed: bool
) -> tf.Tensor:
    """Computes a dilated convolution of stride 1: rows that meet become images of their own."""
    sizes = static_sizes(image)[1:-1]
    more = [[0, -size % times] for size, times in zip(sizes, spread, strict=True)]
    phases = tf.space_to_batch(image, spread, more)
    rows, taps = static_sizes(phases)[1:-1], static_sizes(weight)[: len(spread)]
    enlarged = [n + k - 1 for n, k in zip(rows, taps, strict=True)] if is_transposed else None
    ones = [1] * len(spread)
    return tf.batch_to_space(_convolve(phases, weight, ones, ones, enlarged), spread, more)


def _with_zeros(weight: tf.Tensor, spread: list[int]) -> tf.Tensor:
    """Returns a dilated filter: one with zeros between its elements."""
    for at, times in enumerate(spread):
        sizes = static_sizes(weight)
        length, sizes[at] = (sizes[at] - 1) * times + 1, sizes[at] * times
        rows = tf.stack([weight, *[tf.zeros_like(weight)] * (times - 1)], at + 1)
        weight = rows_of(tf.reshape(rows, sizes), at, 0, length)
    return weight


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


def steps_by_name(what: str, steps: Steps, names: Iterable[str]) -> dict[str, int]:
    """Returns a number of at least 1 for each name."""
    names = list(names)
    numbers = {name: steps for name in names} if isinstance(steps, int) else dict(steps)
    if set(numbers) != set(names) or min(numbers.values()) < 1:
        raise ShapeError(
            f"{what} are {steps}; give one number of at least 1, or one for each of "
            f"{', '.join(names)}"
        )
    return numbers


def check_padding(padding: Padding) -> None:
    """Raises a ShapeError unless the padding is one of the two."""
    if padding not in ("SAME", "VALID"):
        raise ShapeError(f"padding is {padding!r}; it is 'SAME' or 'VALID'")


def _check_window(x: Tensor, filters: Tensor, window: Mapping[str, str]) -> None:
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
