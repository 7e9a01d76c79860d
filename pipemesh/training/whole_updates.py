"""Atomic updates of weights: all of a step, or none."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.recurrent import LossScale

# Texts of the error that ends a step.
NOT_FINITE = "the norm of all gradients is not finite"
LOSS_NOT_FINITE = "the loss is not finite"
OVERFLOWED = "the scaled gradients of a pipeline are not finite"


def all_or_none(
    var_grads: Any, loss: tf.Tensor | None = None, scales: Sequence[LossScale] = ()
) -> Any:
    """Holds back all updates until all gradients are known to be finite.

    lingvo checks each gradient separately, so a failed step leaves some weights new and some old.
    Its optimizers also apply momentum of earlier steps, so zeros in place of a gradient do not
    help.

    Args:
        var_grads: a NestedMap of lingvo's pairs of variable and gradient; pass the function to
            `Learner.Apply(..., gradient_adjuster=all_or_none)`.
        loss: a loss that must be finite as well; None if other code checks it.
        scales: the loss scales of pipelines that compute in float16; these set overflowed gradients
            to 0.

    Returns:
        The same gradients, available only if the norm of all is finite. Otherwise a function that
        is called eagerly raises an error with `NOT_FINITE`, `LOSS_NOT_FINITE` or `OVERFLOWED`, and
        only the scales have changed.

    Example:
        >>> w = tf.Variable([1.0, 2.0])
        >>> pairs = py_utils.NestedMap(w=py_utils.VarGrad(w, tf.constant([3.0, 4.0])))
        >>> all_or_none(pairs).w.grad.numpy().tolist()
        [3.0, 4.0]
    """
    gradients = [gradient for _, gradient in var_grads.Flatten()]
    squared: Any = py_utils.SumSquared(gradients)
    wanted = [(tf.math.is_finite(squared), NOT_FINITE, "all_gradients")]
    if scales:
        # The flags are known once all gradients are.
        with tf.control_dependencies([squared]):
            is_finite = tf.reduce_all(tf.stack([scale.finite for scale in scales]))
        wanted.insert(0, (is_finite, OVERFLOWED, "scaled_gradients"))
    if loss is not None:
        is_finite = tf.reduce_all(tf.math.is_finite(loss))
        wanted.insert(0, (is_finite, LOSS_NOT_FINITE, "loss"))
    # Only the first failed check raises its error.
    checks, is_known = [], tf.constant(False)
    for is_finite, told, name in wanted:
        checks.append(tf.debugging.Assert(is_finite | is_known, [told], name=name))
        is_known |= ~is_finite

    def behind_check(pair: Any) -> Any:
        variable, gradient = pair
        with tf.control_dependencies([check for check in checks if check is not None]):
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(
                    _on(gradient.values), gradient.indices, gradient.dense_shape
                )
            else:
                gradient = _on(gradient)
        return py_utils.VarGrad(variable, gradient)

    return var_grads.Transform(behind_check)


def is_not_finite(told: str) -> bool:
    """Returns whether an error reports values that are not finite, whatever raised it."""
    return re.search(r"\bnot finite\b|\b(nan|inf)\b", told, re.IGNORECASE) is not None


def _on(gradient: tf.Tensor) -> tf.Tensor:
    """Returns the gradient on its own device, where the weight is updated."""
    with tf.device(gradient.device or None):
        return tf.identity(gradient)
