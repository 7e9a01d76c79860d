"""Draws of the part of the whole batch's random numbers that belongs to a microbatch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.graphs import operations_within
from pipemesh.backend.operation_kinds import DRAWS_WITH_STATE, DRAWS_WITHOUT_STATE
from pipemesh.backend.operations import is_marked, mark
from pipemesh.backend.static_shape import static_vector
from pipemesh.errors import PipelineError
from pipemesh.plan.homes import BATCH, LENGTH
from pipemesh.randomness.scope import (
    NeedWholeDraws,
    Position,
    WholeDraw,
    next_draw,
    scopes,
)

# TensorFlow's number of the generator, and the number of 32-bit values per step of its counter.
PHILOX = 1
_GROUP = 4
# The attribute of operations in a graph whose draws do not depend on the plan.
KEYED = "_pipemesh_keyed"


class Share(NamedTuple):
    """The part of the whole batch's draw that a microbatch gets."""

    # The microbatch's numbers, viewed as `[left, examples, right]`, are those of the whole batch,
    # viewed as `[left, num_microbatches * examples, right]`, from `examples * microbatch` on in the
    # middle.
    whole: tuple[int, ...]
    # The product of the sizes before the batch, including those folded into its dim.
    left: int
    examples: int
    right: int
    position: Position


def note_draw(sizes: tuple[int, ...]) -> str:
    """Notes a draw in the scope and returns its name; call it once for each draw."""
    scope = scopes.stack[-1]
    if scope.is_gradient and sizes:
        raise PipelineError(
            f"random numbers of shape {sizes} are drawn while gradients are computed, and would "
            "differ from those of the forward pass. If a layer recomputes its activations "
            "(tf.recompute_grad), leave that to the pipeline (remat). If its gradient is random, "
            "draw the numbers in the forward pass and pass them in"
        )
    name = next_draw(scope)
    scope.drawn[name] = WholeDraw(sizes)
    return name


@dataclasses.dataclass(frozen=True)
class SliceOfDraw:
    """The part of the whole sequences' draw for a slice: its dim, the whole sizes, its begin."""

    dim: int
    sizes: tuple[int, ...]
    begin: tf.Tensor


def _dim(names: Sequence[str], name: str, sizes: Sequence[int], size: int) -> int:
    """Returns the index of the dim with a name; raises `NeedWholeDraws` unless it has this size."""
    if name not in names or sizes[names.index(name)] != size:
        raise NeedWholeDraws
    return names.index(name)


def _with_size(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def slice_of_draw(
    name: str, sizes: tuple[int, ...], names: Sequence[str] = ()
) -> SliceOfDraw | None:
    """Returns the part of the whole sequences' draw that a draw is, None if slices are equal.

    The `names` of its dims say what it is part of, if `batch` and `length` are among them; for
    others the draws of whole sequences have to be known, or it raises `NeedWholeDraws`.
    """
    scope = scopes.stack[-1]
    position = scope.position
    if position is None or position.slice is None or not sizes:
        return None
    if position.whole is None:
        _dim(names, BATCH, sizes, position.microbatch_size)
        dim = _dim(names, LENGTH, sizes, position.slice_size)
        return SliceOfDraw(dim, _with_size(sizes, dim, position.length), position.begin)
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
    if not same or len(dims) != 1 or (sizes[dims[0]], whole[dims[0]]) != (size, position.length):
        raise PipelineError(
            f"layer {scope.layer!r} draws a random tensor of shape {sizes} for a slice of the "
            f"sequences and {whole} for whole ones; one dim may differ, and is the {size} "
            f"positions of a slice, of which there are {count}. Draw in a shape where the "
            "sequence is a separate dim (before that dim is reshaped), or give a schedule without "
            "slices"
        )
    return SliceOfDraw(dims[0], whole, position.begin)


def share_of_draw(
    name: str,
    sizes: tuple[int, ...],
    sequence_slice: SliceOfDraw | None = None,
    names: Sequence[str] = (),
) -> Share | None:
    """Returns the part of the whole batch's draw that a draw is, None if it is all of it.

    With a `sequence_slice` the share is that of the microbatch's whole sequences. The `names` of
    its dims say what it is part of, if `batch` is among them; for others the draws of the whole
    batch have to be known, or it raises `NeedWholeDraws`.
    """
    scope = scopes.stack[-1]
    position = scope.position
    if position is None or position.num_microbatches == 1 or not sizes:
        return None
    if position.whole is None:
        named = _dim(names, BATCH, sizes, position.microbatch_size)
        whole = _with_size(sizes, named, sizes[named] * position.num_microbatches)
    elif name not in position.whole.by_name:
        raise PipelineError(
            f"layer {scope.layer!r} draws more random tensors for a microbatch than for the whole "
            "batch; the number of draws must not depend on the batch size"
        )
    else:
        whole = position.whole.by_name[name].sizes
    if whole == sizes:
        return None
    count, examples = position.num_microbatches, position.microbatch_size
    differing = [dim for dim, (a, b) in enumerate(zip(sizes, whole, strict=False)) if a != b]
    dim = differing[0] if len(sizes) == len(whole) and len(differing) == 1 else None
    if dim is not None and sizes[dim] * count != whole[dim]:
        dim = None
    if dim is not None and sequence_slice is not None and sequence_slice.dim == dim:
        raise PipelineError(
            f"layer {scope.layer!r} draws a random tensor of shape {sizes}, in whose dim {dim} "
            "examples and positions of sequences are folded into one; draw in a shape where each "
            "is a separate dim, or give a schedule without slices"
        )
    if dim is None or (sizes[dim] % examples and examples % sizes[dim]):
        raise PipelineError(
            f"layer {scope.layer!r} draws a random tensor of shape {sizes} for a microbatch and "
            f"{whole} for the whole batch; one dim may differ, by the factor {count} (the number "
            f"of microbatches), and must be a multiple or a divisor of the {examples} examples of "
            "a microbatch. Draw in a shape with a batch dim"
        )
    if sequence_slice is not None:
        cut = sequence_slice.dim
        whole = _with_size(whole, cut, sequence_slice.sizes[cut])
        sizes = sequence_slice.sizes
    size = sizes[dim]
    left, right = math.prod(sizes[:dim]), math.prod(sizes[dim + 1 :])
    if position.whole is None or examples % size == 0:
        # An element for each example, or for several adjacent ones.
        return Share(whole, left, size, right, position)
    folded = size // examples
    before = position.whole.before(name, dim, folded)
    return Share(whole, left * before, examples, folded // before * right, position)


def draw(
    shape: Any, key: Any, counter: Any, grouped: bool, call: Callable[[Any, Any, Any], Any]
) -> tf.Tensor:
    """Draws the slice of the whole batch's numbers that belongs to the scope."""
    # `counter` is where the whole batch's draw begins; `grouped` says whether each number takes one
    # of the 32-bit values that the generator counts; `call` draws from shape, key and counter.
    scope = scopes.stack[-1]
    if scope.position is None:
        # The whole batch: exactly TensorFlow's draw, dynamic shapes included. Static shapes are
        # noted for the microbatches.
        value = static_vector(shape)
        sizes = () if value is None else tuple(int(size) for size in value)
        name = note_draw(sizes)
        numbers = keyed(call(shape, key, counter))
        if scope.graph is not None:
            scope.drawn[name] = WholeDraw(sizes, ((numbers, (0,) * len(sizes)),))
        return numbers
    micro = _static_shape(shape)
    name = note_draw(micro)
    part = slice_of_draw(name, micro)
    share = share_of_draw(name, micro, part)
    sizes = micro if part is None else part.sizes
    group = _GROUP if grouped else None
    if share is None:
        numbers = _block(call, key, counter, group, sizes, [], sizes)
    else:
        block = share.examples * share.right
        whole = [share.left, share.position.num_microbatches, block]
        begin = [0, share.position.microbatch, 0]
        numbers = _block(call, key, counter, group, whole, begin, [share.left, 1, block])
        numbers = tf.reshape(numbers, sizes)
    if part is None:
        return numbers
    begin = tf.one_hot(part.dim, len(micro), part.begin, tf.constant(0, tf.int64))
    return tf.slice(numbers, begin, tf.constant(micro, tf.int64))


def keyed(numbers: tf.Tensor) -> tf.Tensor:
    """Marks the drawing operation as one whose numbers do not depend on the plan."""
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
            "have them, set the shape that the layer loses (set_shape)"
        )
    return tuple(int(size) for size in value)


def advance_counter(counter: Any, steps: Any) -> tf.Tensor:
    """Returns a Philox counter, two 64-bit halves, advanced by an int64 number of steps."""
    low, high = counter[0], counter[1]
    moved = low + tf.cast(steps, tf.uint64)
    carry = tf.cast(moved < low, tf.uint64)
    return tf.stack([moved, high + carry])


# One of the generated operations `StatelessRandom...V2`, called with keywords.
RawDraw = Callable[..., Any]


def draw_block(
    raw: RawDraw,
    sizes: Sequence[int],
    begin: Sequence[tf.Tensor | int],
    block: Sequence[int],
    seed: tf.Tensor,
    dtype: tf.DType,
) -> tf.Tensor:
    """Draws a block of the random tensor that `raw` would draw as a whole."""
    if math.prod(block) == 0:
        return tf.zeros(block, dtype)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return _block(
        lambda shape, key, counter: raw(
            shape=shape, key=key, counter=counter, alg=PHILOX, dtype=dtype
        ),
        key,
        counter,
        # A count yields 128 bits, and a number takes at least 32 of them.
        16 // max(4, dtype.size),
        sizes,
        begin,
        block,
    )


def _block(
    call: Callable[[Any, Any, Any], Any],
    key: Any,
    counter: Any,
    group: int | None,
    sizes: Sequence[int],
    begin: Sequence[tf.Tensor | int],
    block: Sequence[int],
) -> tf.Tensor:
    """Draws a block of the tensor that `call` would draw of shape, key and counter."""
    # If only leading dims are cut, no other numbers are computed: Philox counts groups of numbers,
    # so a draw can start anywhere (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
    # 2011). Of the dims behind, all numbers are drawn and the block is cut out. So are all dims
    # without a `group`, the number of numbers that each count yields.

    def draw(shape: Sequence[int], first: Any) -> tf.Tensor:
        return keyed(call(tf.constant(shape, tf.int32, shape=[len(shape)]), key, first))

    if list(sizes) == list(block):
        return draw(sizes, counter)
    # Leading dims: up to the first in which the block has more than one element.
    lead = next((i for i, size in enumerate(block) if size > 1), len(block) - 1) + 1
    if group is None:
        lead, group = 0, 1
    begin = [_known(at) for at in begin]
    strides = [math.prod(sizes[i + 1 :]) for i in range(lead)]
    drawn = [*block[:lead], *sizes[lead:]]
    if all(isinstance(at, int) or s % group == 0 for at, s in zip(begin, strides, strict=False)):
        # The offset of the block in a group is known statically, and mostly 0.
        fixed = sum(at * s for at, s in zip(begin, strides, strict=False) if isinstance(at, int))
        moved = [
            tf.cast(at, tf.int64) * (s // group)
            for at, s in zip(begin, strides, strict=False)
            if not isinstance(at, int)
        ]
        steps, skipped = divmod(fixed, group)
        if steps:
            moved.append(tf.constant(steps, tf.int64))
        first = advance_counter(counter, tf.add_n(moved)) if moved else counter
    else:
        start = sum(tf.cast(at, tf.int64) * s for at, s in zip(begin, strides, strict=False))
        first, skipped = advance_counter(counter, start // group), tf.math.floormod(start, group)
    if isinstance(skipped, int) and skipped == 0:
        numbers = draw(drawn, first)
    else:
        run = math.prod(drawn)
        numbers = draw([run + group - 1], first)
        numbers = tf.reshape(tf.slice(numbers, [skipped], [run]), drawn)
    if drawn == list(block):
        return numbers
    return tf.slice(numbers, [*[0] * lead, *begin[lead:]], block)


def _known(at: tf.Tensor | int) -> tf.Tensor | int:
    """Returns a static number as a Python int, any other one unchanged."""
    value = at if isinstance(at, int) else tf.get_static_value(at)
    return at if value is None else int(value)


def check_no_draw_escaped(graph: tf.Graph, stage: str, num_microbatches: int) -> None:
    """Raises an error if a traced stage draws random numbers that depend on the plan."""
    # Such draws are in functions traced outside the scope that cannot be traced again (a
    # `ConcreteFunction`, a function of a SavedModel), or come from `tf.raw_ops`.
    uncontrolled = (
        DRAWS_WITH_STATE | DRAWS_WITHOUT_STATE if num_microbatches > 1 else DRAWS_WITH_STATE
    )
    for inside, operation in operations_within(graph):
        if operation.type not in uncontrolled or is_marked(operation, KEYED):
            continue
        if not inside:
            place, advice = "", "call the function of tf.random instead of tf.raw_ops"
        else:
            place = f" in the function {inside[-1]!r}, which was traced outside the pipeline,"
            advice = (
                "call the tf.function itself instead of a ConcreteFunction of it or of a SavedModel"
            )
        consequence = (
            "would differ when the stage is recomputed"
            if operation.type in DRAWS_WITH_STATE
            else "would be the same for every microbatch"
        )
        raise PipelineError(
            f"stage {stage!r} draws random numbers by {operation.name!r}, a {operation.type} "
            f"operation{place} that the pipeline does not control: they {consequence}; {advice}, "
            "or pass the numbers in as an input"
        )
