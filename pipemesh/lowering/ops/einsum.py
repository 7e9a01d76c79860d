"""Einsums over named dims."""

from __future__ import annotations

import functools
import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import register
from pipemesh.lowering.costs import operation
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.ops.relayout import (
    NO_NAMES,
    gather_to_meet,
    renamed_shape,
    summed,
)
from pipemesh.lowering.tensor import Tensor, check_same_dtype, check_same_lowering, union_axes
from pipemesh.mesh import Shape
from pipemesh.text import almost_equal


@register("einsum", "all_reduce", "reduce_scatter")
def einsum(
    operands: Sequence[Tensor], dims: Sequence[str], names: Mapping[str, str] = NO_NAMES
) -> Tensor:
    """Multiplies operands, matches dims by name, and sums over the dims that the result lacks.

    Sums over split dims end in an all-reduce.

    Args:
        operands: one or more tensors.
        dims: the names of the dims of the result, in order; each is a dim of an operand.
        names: new names of the result's dims by old ones, as for `rename`. If the layout splits a
            dim's new name over an axis that is summed over, the sum ends in a reduce-scatter.

    Raises:
        ShapeError: a name has two sizes, no operand has a dim of the result, or the dtypes differ.
            Also if two operands are summed over dims whose names differ by a typo.
        LayoutError: the rules split two dims of all operands together over one axis. Rename one of
            them beforehand, which moves the data.

    Example:
        A matmul is `einsum([x, w], ["batch", "out"])`, with x of `batch, hidden` and w of
        `hidden, out`.
    """
    check_same_lowering(operands)
    axes = union_axes(operands)
    return _product(operands, [operand.vary(axes) for operand in operands], dims, names)


def products(
    x: Tensor,
    others: Sequence[Tensor],
    dims: Sequence[Sequence[str]],
    names: Mapping[str, str] = NO_NAMES,
) -> list[Tensor]:
    """Returns the einsums of one operand, its dims renamed by `names`, with each of `others`."""
    # Separate einsums would each sum the gradient of `x` over the axes that split the other
    # operand. Here the gradients are added first and sent once. If renaming gathers a dim over an
    # axis that splits all others, the gradient of `x` is sent by a reduce-scatter.
    lowering = check_same_lowering([x, *others])
    gathered: Sequence[str] = ()
    if names:
        shape = renamed_shape(x.shape, names)
        shared = set.intersection(*(set(other.split_axes) for other in others))
        new = lowering.tensor_layout(shape).axes
        slices, gathered = gather_to_meet(lowering, x.slices, x.layout.axes, new, shared)
        x = Tensor(lowering, slices, shape)
    varied: dict[tuple[str, ...], Slices] = {}
    results: list[Tensor] = []
    for other, result in zip(others, dims, strict=True):
        axes = union_axes([x, other])
        lacking = tuple(axis for axis in axes if axis not in (*x.split_axes, *gathered))
        if lacking not in varied:
            varied[lacking] = x.vary(lacking)
        with operation("einsum", [x, other], is_arithmetic=False):
            results.append(_product([x, other], [varied[lacking], other.vary(axes)], result))
    return results


def _product(
    operands: Sequence[Tensor],
    varied: Sequence[Slices],
    dims: Sequence[str],
    names: Mapping[str, str] = NO_NAMES,
) -> Tensor:
    """Multiplies operands whose slices already vary along the axes of all of them."""
    lowering = check_same_lowering(operands)
    check_same_dtype(operands)
    union = functools.reduce(operator.or_, (operand.shape for operand in operands))
    shape = union.select(*dims)
    _check_summed(operands, union.without(*shape.names))
    if len(union) > len(string.ascii_letters):
        raise ShapeError(f"the operands have {len(union)} dims; at most 52 are possible")
    # All dims together: the slices of a dim must match between operands.
    layout = lowering.tensor_layout(union)
    letters = dict(zip(union.names, string.ascii_letters, strict=False))

    def term(of: Shape) -> str:
        return "".join(letters[name] for name in of.names)

    partial = lowering.map(
        local_product([term(operand.shape) for operand in operands], term(shape)),
        *varied,
        flops=product_flops(layout.slice_shape, len(operands)),
    )
    axes = union_axes(operands)
    kept = lowering.tensor_layout(shape).split_axes
    return summed(lowering, partial, shape, [axis for axis in axes if axis not in kept], names)


def _check_summed(operands: Sequence[Tensor], summed: Shape) -> None:
    """Rejects misspelt dims: each operand would be summed over its own spelling."""
    alone = [
        [dim for dim in operand.shape & summed if sum(dim in o.shape for o in operands) == 1]
        for operand in operands
    ]
    for i, dims in enumerate(alone):
        others = [other for rest in alone[i + 1 :] for other in rest]
        for dim in dims:
            near = almost_equal(dim.name, [o.name for o in others if o.size == dim.size])
            if near is not None:
                raise ShapeError(
                    f"'{dim}' of one operand and '{near}:{dim.size}' of another are summed over, "
                    "each by itself; if they are one dim, rename one of them, otherwise "
                    "ops.reduce_sum one of them before"
                )


def product_flops(sizes: Sequence[int], operands: int = 2) -> int:
    """Returns the flops of a product, given the sizes of all dims of its operands together."""
    return math.prod(sizes) * (2 if operands > 1 else 1)


def local_product(terms: Sequence[str], result: str) -> Callable[..., tf.Tensor]:
    """Returns a function of slices that computes an einsum; each letter of a term is a dim."""

    def product(*slices: tf.Tensor) -> tf.Tensor:
        if len(slices) == 2:
            left, right = zip(terms, slices, strict=True)
            # On CPUs `MatMul` is several percent faster than `Einsum`, which uses another kernel.
            for one, other in ((left, right), (right, left)):
                found = _matmul(*one, *other, result)
                if found is not None:
                    return found
        return tf.einsum(f"{','.join(terms)}->{result}", *slices)

    return product


def _matmul(left: str, a: tf.Tensor, right: str, b: tf.Tensor, result: str) -> tf.Tensor | None:
    """Computes an einsum as a matmul, if runs of dims can be merged and none is transposed."""
    # The left operand's kept dims, the summed dims, and the right operand's kept dims.
    rows = "".join(letter for letter in left if letter in result)
    summed = "".join(letter for letter in left if letter not in result)
    cols = "".join(letter for letter in right if letter in result)
    is_possible = (
        bool(summed)
        and result == rows + cols
        and left in (rows + summed, summed + rows)
        and right in (summed + cols, cols + summed)
    )
    is_static = a.shape.is_fully_defined() and b.shape.is_fully_defined()
    if not (is_possible and is_static and a.dtype.is_floating):
        return None
    sizes = dict(zip(left + right, static_sizes(a) + static_sizes(b), strict=True))
    m, k, n = (math.prod(sizes[letter] for letter in part) for part in (rows, summed, cols))
    turn_a, turn_b = left != rows + summed, right != summed + cols
    product = tf.matmul(
        _reshaped(a, [k, m] if turn_a else [m, k]),
        _reshaped(b, [n, k] if turn_b else [k, n]),
        transpose_a=turn_a,
        transpose_b=turn_b,
    )
    return _reshaped(product, [sizes[letter] for letter in result])


def _reshaped(tensor: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    return tensor if tensor.shape == sizes else tf.reshape(tensor, sizes)
