"""Draws the slice of the whole batch's random numbers that belongs to a microbatch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.operations import mark
from pipemesh.backend.static_shape import static_vector
from pipemesh.errors import PipelineError
from pipemesh.randomness.scope import (
    NeedWholeDraws,
    Position,
    WholeDraw,
    next_draw,
    scopes,
)

# TensorFlow's number for the generator, and the 32-bit values that one step of its counter yields.
PHILOX = 1
_GROUP = 4
# Says of an operation in a graph that the numbers it draws are those of the plan.
KEYED = "_pipemesh_keyed"


class Share(NamedTuple):
    """Which part of the whole batch's draw a microbatch gets.

    The microbatch's numbers, viewed as `[left, mine, right]`, are those of the whole batch, viewed
    as `[left, num_microbatches * mine, right]`, from `mine * microbatch` on in the middle.

    Attributes:
        whole: the sizes of the whole batch's draw.
        left: product of the sizes before the batch, those folded into its dim included.
        mine: the examples of the microbatch.
        right: product of the sizes behind.
        position: of the microbatch.
    """

    whole: tuple[int, ...]
    left: int
    mine: int
    right: int
    position: Position


def note_draw(sizes: tuple[int, ...]) -> str:
    """Notes a draw in the scope; to be called once for each.

    Args:
        sizes: of the tensor that is drawn.

    Returns:
        Its name.
    """
    scope = scopes.stack[-1]
    if scope.is_gradient and sizes:
        raise PipelineError(
            f"random numbers of shape {sizes} are drawn while gradients are computed. If a layer "
            "computes its activations again (tf.recompute_grad), leave that to the pipeline "
            "(remat): what is drawn again would not be what was drawn before. If its gradient is "
            "random itself, draw the numbers before and pass them in"
        )
    name = next_draw(scope)
    scope.drawn[name] = WholeDraw(sizes)
    return name


@dataclasses.dataclass(frozen=True)
class SliceOfDraw:
    """Which part of the whole sequences' draw a slice of the sequences gets.

    Attributes:
        dim: along which it lies.
        sizes: those of the draw for whole sequences.
        begin: int64 scalar, where it begins along `dim`.
    """

    dim: int
    sizes: tuple[int, ...]
    begin: tf.Tensor


def slice_of_draw(name: str, sizes: tuple[int, ...]) -> SliceOfDraw | None:
    """Finds the part of the whole sequences' draw that a draw is.

    Args:
        name: from `note_draw`.
        sizes: of the draw.

    Returns:
        None if it is the same for all slices, or sequences are whole.

    Raises:
        NeedWholeDraws: it is not known yet what is drawn for whole sequences.
        PipelineError: the draw cannot be cut into slices.
    """
    scope = scopes.stack[-1]
    position = scope.position
    if position is None or position.slice is None or not sizes:
        return None
    if position.whole is None:
        raise NeedWholeDraws
    if name not in position.whole.of_sequences:
        raise PipelineError(
            f"layer {scope.layer!r} draws more random tensors for a slice of the sequences than "
            "for whole ones; the number of draws must not depend on their length"
        )
    whole = position.whole.of_sequences[name].sizes
    if whole == sizes:
        return None
    same = len(whole) == len(sizes)
    dims = [d for d, (a, b) in enumerate(zip(sizes, whole, strict=False)) if a != b]
    size, count = position.slice_size, position.num_slices
    if not same or len(dims) != 1 or (sizes[dims[0]], whole[dims[0]]) != (size, size * count):
        raise PipelineError(
            f"layer {scope.layer!r} draws a random tensor of shape {sizes} for a slice of the "
            f"sequences and {whole} for whole ones; one dim may differ, and is the {size} "
            f"positions of a slice, of which there are {count}. Draw in a shape where the "
            "sequence is a dim of its own (before that dim is reshaped), or give a schedule "
            "without slices"
        )
    return SliceOfDraw(dims[0], whole, position.slice * size)


def share_of_draw(
    name: str, sizes: tuple[int, ...], mine: SliceOfDraw | None = None
) -> Share | None:
    """Finds the part of the whole batch's draw that a draw is.

    Args:
        name: from `note_draw`.
        sizes: of the draw.
        mine: which part of the whole sequences' draw it is. Then the share is that of the
            microbatch's whole sequences.

    Returns:
        None if the draw is that of the whole batch.

    Raises:
        NeedWholeDraws: it is not known yet what the whole batch draws.
        PipelineError: the draw cannot be cut into microbatches.
    """
    scope = scopes.stack[-1]
    position = scope.position
    if position is None or position.num_microbatches == 1 or not sizes:
        return None
    if position.whole is None:
        raise NeedWholeDraws
    if name not in position.whole.of:
        raise PipelineError(
            f"layer {scope.layer!r} draws more random tensors for a microbatch than for the whole "
            "batch; the number of draws must not depend on the batch size"
        )
    whole = position.whole.of[name].sizes
    if whole == sizes:
        return None
    dim = _batch_dim(sizes, whole, position, scope.layer)
    if mine is not None:
        if mine.dim == dim:
            raise PipelineError(
                f"layer {scope.layer!r} draws a random tensor of shape {sizes}, in whose dim {dim} "
                "examples and positions of sequences are folded into one; draw in a shape where "
                "each is a dim of its own, or give a schedule without slices"
            )
        whole = (*whole[: mine.dim], mine.sizes[mine.dim], *whole[mine.dim + 1 :])
        sizes = mine.sizes
    size, examples = sizes[dim], position.microbatch_size
    left, right = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
    if examples % size == 0:
        # An element for each example, or for several neighbours.
        return Share(whole, left, size, right, position)
    if size % examples:
        raise _cannot_cut(sizes, whole, position, scope.layer)
    folded = size // examples
    before = position.whole.before(name, dim, folded)
    return Share(whole, left * before, examples, folded // before * right, position)


def _batch_dim(
    sizes: tuple[int, ...], whole: tuple[int, ...], position: Position, layer: str
) -> int:
    differing = [dim for dim, (a, b) in enumerate(zip(sizes, whole, strict=False)) if a != b]
    if (
        len(sizes) != len(whole)
        or len(differing) != 1
        or sizes[differing[0]] * position.num_microbatches != whole[differing[0]]
    ):
        raise _cannot_cut(sizes, whole, position, layer)
    return differing[0]


def _cannot_cut(
    sizes: tuple[int, ...], whole: tuple[int, ...], position: Position, layer: str
) -> PipelineError:
    return PipelineError(
        f"layer {layer!r} draws a random tensor of shape {sizes} for a microbatch and {whole} for "
        f"the whole batch; one dim may differ, by the factor {position.num_microbatches} (the "
        f"number of microbatches), and is a multiple of the {position.microbatch_size} examples of "
        "a microbatch or divides them"
    )


def draw(
    shape: Any, key: Any, counter: Any, grouped: bool, call: Callable[[Any, Any, Any], Any]
) -> tf.Tensor:
    """Draws the slice of the whole batch's numbers that belongs to the scope.

    Args:
        shape: of the draw.
        key: of the generator.
        counter: of the generator, where the whole batch's draw begins.
        grouped: whether each number takes one of the 32-bit values that the generator counts.
        call: draws; it takes shape, key and counter.

    Raises:
        PipelineError: the draw cannot be cut into microbatches.
    """
    scope = scopes.stack[-1]
    if scope.position is None:
        # The whole batch: exactly what TensorFlow draws, dynamic shapes included. Static ones
        # are noted for the microbatches to look up.
        value = static_vector(shape)
        sizes = () if value is None else tuple(int(size) for size in value)
        name = note_draw(sizes)
        numbers = keyed(call(shape, key, counter))
        if scope.graph is not None:
            scope.drawn[name] = WholeDraw(sizes, ((numbers, (0,) * len(sizes)),))
        return numbers
    micro = _static_shape(shape)
    name = note_draw(micro)
    mine = slice_of_draw(name, micro)
    share = share_of_draw(name, micro, mine)
    if mine is None:
        if share is None:
            return keyed(call(shape, key, counter))
        return _drawn(share, micro, key, counter, grouped, call)
    numbers = _drawn(share, mine.sizes, key, counter, grouped, call)
    begin = tf.one_hot(mine.dim, len(micro), mine.begin, tf.constant(0, tf.int64))
    return tf.slice(numbers, begin, tf.constant(micro, tf.int64))


def _drawn(
    share: Share | None,
    micro: tuple[int, ...],
    key: Any,
    counter: Any,
    grouped: bool,
    call: Callable[[Any, Any, Any], Any],
) -> tf.Tensor:
    """A microbatch's numbers, of sizes `micro`."""
    if share is None:
        return keyed(call(tf.constant(micro), key, counter))
    whole, left, mine, right, position = share
    block = mine * right
    if left == 1 and grouped:
        start = position.microbatch * block
        counter = advance_counter(counter, start // _GROUP)
        if block % _GROUP == 0:
            return keyed(call(tf.constant(micro), key, counter))
        numbers = keyed(call(tf.constant([block + _GROUP - 1]), key, counter))
        return tf.reshape(tf.slice(numbers, [tf.math.floormod(start, _GROUP)], [block]), micro)
    # The slice is not one run of elements: draw the whole batch's numbers and take it out.
    numbers = keyed(call(tf.constant(whole), key, counter))
    rows = tf.reshape(numbers, [left, position.num_microbatches, block])
    return tf.reshape(tf.gather(rows, position.microbatch, axis=1), micro)


def keyed(numbers: tf.Tensor) -> tf.Tensor:
    """Marks the operation that draws as one whose numbers are those of the plan."""
    if tf.is_symbolic_tensor(numbers):
        mark(numbers.op, KEYED)
    return numbers


def _static_shape(shape: Any) -> tuple[int, ...]:
    value = static_vector(shape)
    if value is None:
        partial = tf.fill(shape, False).shape
        raise PipelineError(
            f"layer {scopes.stack[-1].layer!r} draws random numbers of a shape that is not known "
            f"before the step runs ({partial}). Give the pipeline's inputs static shapes; if they "
            "have, set the shape that the layer loses (set_shape)"
        )
    return tuple(int(size) for size in value)


def advance_counter(counter: Any, steps: Any) -> tf.Tensor:
    """A counter of Philox further on.

    Args:
        counter: the 128 bits, as two of 64.
        steps: int64 scalar, not negative.
    """
    low, high = counter[0], counter[1]
    moved = low + tf.cast(steps, tf.uint64)
    carry = tf.cast(moved < low, tf.uint64)
    return tf.stack([moved, high + carry])
