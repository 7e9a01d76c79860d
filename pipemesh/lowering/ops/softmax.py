"""Softmax over named dims."""

from __future__ import annotations

from pipemesh.lowering.ops import elementwise
from pipemesh.lowering.ops.reduce import Dims, extreme, reduce_logsumexp, reduce_sum, widened
from pipemesh.lowering.registry import register
from pipemesh.lowering.tensor import Tensor


@register("softmax", "all_reduce")
def softmax(x: Tensor, dims: Dims) -> Tensor:
    """Divides exponentials by their sum over dims.

    Half precision is computed in float32: a sum of 65,520 ones is infinite in float16.

    Args:
        x: floating numbers.
        dims: the names of the dims over which the result sums to 1.

    Raises:
        ShapeError: a name is unknown.
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

    Raises:
        ShapeError: a name is unknown.
    """
    wide = widened(x)
    return elementwise.cast(elementwise.subtract(wide, reduce_logsumexp(wide, dims)), x.dtype)
