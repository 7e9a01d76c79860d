"""Sums that round alike wherever their addends come from."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.operations import mark

# By it the graph optimizer knows the sums that it has merged, and leaves them alone from then on.
MERGED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def sum_in_order(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds tensors from the first to the last, two at a time.

    `tf.add_n` of three and more begins with any whose memory it can take for the sum, so that the
    last bit depends on which of them has been received, and from where; and the graph optimizer
    makes one such operation of all additions of a device that follow each other. Of two, the sum
    is the same in either order; and these are not merged.

    Args:
        tensors: of one shape and dtype, at least one.

    Returns:
        The sum; a single tensor as it is.

    Example:
        >>> float(sum_in_order([tf.constant(1e8), tf.constant(-1e8), tf.constant(1.0)]))
        1.0
    """
    total = tensors[0]
    for tensor in tensors[1:]:
        total = tf.add_n([total, tensor])
        if tf.is_symbolic_tensor(total):
            mark(total.op, MERGED)
    return total
