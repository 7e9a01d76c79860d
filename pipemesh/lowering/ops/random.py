"""Random numbers that are the same under every layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.lowering.arguments import as_shape, register
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.ops import elementwise
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Shape
from pipemesh.randomness.draws import (
    RawDraw,
    Share,
    draw_block,
    note_draw,
    share_of_draw,
    slice_of_draw,
)
from pipemesh.randomness.scope import WholeDraw, is_active, scopes


def _draw(
    lowering: Lowering, shape: Shape, seed: tf.Tensor, dtype: tf.DType, raw: RawDraw
) -> Tensor:
    """Draws on each processor its slice of the numbers that one device would draw, in a pipeline
    for the whole batch.
    """
    if scopes.slicewise:
        inside = scopes.slicewise[-1]
        if inside.draw is None:
            raise LayoutError(f"what draws a named tensor {inside.refusal}")
        return inside.draw(shape, seed, dtype, raw)
    layout = lowering.tensor_layout(shape)
    split = [i for i, axis in enumerate(layout.axes) if axis is not None]
    seed = tf.convert_to_tensor(seed)
    name = note_draw(shape.sizes) if is_active() else None
    mine = None if name is None else slice_of_draw(name, shape.sizes, shape.names)
    share = None if name is None else share_of_draw(name, shape.sizes, mine, shape.names)
    sizes = shape.sizes if mine is None else mine.sizes

    def draw(*coordinates: tf.Tensor) -> tf.Tensor:
        begin: list[tf.Tensor | int] = [0] * len(shape)
        for i, at in zip(split, coordinates, strict=True):
            known = tf.get_static_value(at)
            begin[i] = (at if known is None else int(known)) * layout.slice_shape[i]
        if mine is not None:
            begin[mine.dim] = begin[mine.dim] + tf.cast(mine.begin, tf.int32)
        if share is None:
            return draw_block(raw, sizes, begin, layout.slice_shape, seed, dtype)
        return _draw_share(raw, share, sizes, begin, layout.slice_shape, seed, dtype)

    slices = lowering.raw_map(draw, *(lowering.coordinate(str(layout.axes[i])) for i in split))
    lowering.count([], slices)
    if (
        name is not None
        and len(slices) == lowering.mesh.num_devices
        and tf.is_symbolic_tensor(slices[0])
    ):
        # The program of a single core does not know where the slices lie.
        places = [layout.slice_begin(i) for i in range(len(slices))]
        parts = tuple(zip(slices, places, strict=True))
        scopes.stack[-1].drawn[name] = WholeDraw(shape.sizes, parts)
    return Tensor(lowering, slices, shape)


def _draw_share(
    raw: RawDraw,
    share: Share,
    sizes: Sequence[int],
    begin: Sequence[tf.Tensor | int],
    block: Sequence[int],
    seed: tf.Tensor,
    dtype: tf.DType,
) -> tf.Tensor:
    """Draws a block of a microbatch's tensor as a part of the whole batch's."""
    dim = next(i for i, (a, b) in enumerate(zip(sizes, share.whole, strict=True)) if a != b)
    before = share.left // math.prod(sizes[:dim])
    # The examples, and the dims folded into the batch's dim behind them.
    mine = sizes[dim] // before
    first = tf.cast(share.position.microbatch, tf.int32) * mine
    if before == 1:
        begins, at = list(begin), begin[dim]
        begins[dim] = first if isinstance(at, int) and at == 0 else at + first
        return draw_block(raw, share.whole, begins, block, seed, dtype)
    # Other dims are folded into the batch's dim before the examples, so a microbatch is no
    # contiguous run of elements. All elements are drawn and the block is cut out.
    examples = share.whole[dim] // before

    def unfold(of: Sequence[Any], *two: Any) -> list[Any]:
        return [*of[:dim], *two, *of[dim + 1 :]]

    numbers = draw_block(
        raw,
        unfold(share.whole, before, examples),
        unfold(begin, 0, first),
        unfold(block, before, mine),
        seed,
        dtype,
    )
    numbers = tf.reshape(numbers, unfold(block, sizes[dim]))
    return tf.slice(numbers, [at if i == dim else 0 for i, at in enumerate(begin)], block)


_register_draw = register(
    "random",
    arguments="""Args:
    lowering: the lowering of the new tensor.
    shape: the shape of the whole tensor.
    seed: two integers.
    dtype: a floating dtype.

Raises:
    LayoutError: the rules cannot split the tensor.""",
)


@_register_draw
def random_uniform(
    lowering: Lowering, shape: Shape | str, *, seed: tf.Tensor, dtype: tf.DType = tf.float32
) -> Tensor:
    """Draws uniform numbers in [0, 1), equal to `tf.random.stateless_uniform` with Philox."""
    return _draw(lowering, as_shape(shape), seed, dtype, tf.raw_ops.StatelessRandomUniformV2)


@_register_draw
def random_normal(
    lowering: Lowering, shape: Shape | str, *, seed: tf.Tensor, dtype: tf.DType = tf.float32
) -> Tensor:
    """Draws standard normal numbers, equal to `tf.random.stateless_normal` with Philox."""
    return _draw(lowering, as_shape(shape), seed, dtype, tf.raw_ops.StatelessRandomNormalV2)


@register("random")
def dropout(x: Tensor, *, rate: float, seed: tf.Tensor, noise_dims: Shape | None = None) -> Tensor:
    """Sets elements to zero with probability `rate`, and scales the others by 1 / (1 - rate).

    The mask equals that of `tf.nn.experimental.stateless_dropout` with Philox under every layout.
    Half precision uses the mask of float32. So precision changes no mask, and a rate such as 0.1 is
    not rounded to a 128th.

    Args:
        x: floating numbers.
        rate: the probability of a zero, in [0, 1), as in TensorFlow.
        seed: two integers.
        noise_dims: dims of `x` along which elements are dropped independently; along the others
            they are dropped together. By default all.

    Raises:
        ShapeError: `rate` is outside of [0, 1), or a noise dim is not a dim of `x`.
    """
    if not 0 <= rate < 1:
        raise ShapeError(
            f"rate is {rate}; it is the probability of being dropped, at least 0 and less than 1"
        )
    if rate == 0:
        return x
    noise_shape = x.shape if noise_dims is None else noise_dims
    if not noise_shape <= x.shape:
        raise ShapeError(f"noise dims '{noise_shape - x.shape}' are no dims of '{x.shape}'")
    dtype = tf.float32 if x.dtype.size < tf.float32.size else x.dtype
    noise = random_uniform(x.lowering, noise_shape, seed=seed, dtype=dtype)
    scaled = elementwise.multiply(x, 1 / (1 - rate))
    return elementwise.broadcast(
        lambda n, value: tf.where(n >= tf.cast(rate, n.dtype), value, tf.zeros_like(value)),
        [noise, scaled],
        x.shape,
    )
