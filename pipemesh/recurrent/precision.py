"""Dynamic loss scaling, which keeps float16 gradients from vanishing or overflowing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.part import Grads

COMPUTE_DTYPES = (tf.float32, tf.bfloat16, tf.float16)
INITIAL_SCALE = 2.0**15
_FACTOR = 2.0
_GROWTH_INTERVAL = 2000


class LossScale:
    """A factor on the loss before the backward pass, which gradients are divided by after it.

    The smallest positive number of float16 is 6e-8, so small gradients become 0. A large factor
    prevents that, but a factor that is too large makes some gradient infinite. Then the pipeline's
    gradients become 0, and the factor is halved. After 2,000 steps without an overflow it is
    doubled.

    A gradient of 0 still moves an optimizer: Adam's moments and powers, moving averages, weights
    outside the pipeline. To skip the whole update, do it in `when_finite`, or give lingvo's learner
    `pipemesh.training.all_or_none` with this scale, as `pipemesh train` does.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    Args:
        scale: float32 scalar variable, the factor; 32,768 is a good start.
        good_steps: scalar variable, the number of steps since the last change of the factor.
        finite: scalar variable, whether the latest gradients were finite; any dtype.

    Example:
        >>> import tensorflow as tf
        >>> scale = LossScale.create()
        >>> ((gradient,),) = scale.checked([[tf.constant(float("inf"))]])
        >>> float(gradient), float(scale.value)
        (0.0, 16384.0)
    """

    def __init__(self, scale: tf.Variable, good_steps: tf.Variable, finite: tf.Variable) -> None:
        self._scale, self._good_steps, self._finite = scale, good_steps, finite

    @classmethod
    def create(cls) -> LossScale:
        """Creates a scale with new variables, which a checkpoint should include."""

        def variable(value: Any, name: str, dtype: tf.DType | None = None) -> tf.Variable:
            return tf.Variable(value, dtype=dtype, trainable=False, name=name)

        return cls(
            variable(INITIAL_SCALE, "loss_scale"),
            variable(0, "good_steps", tf.int64),
            variable(True, "finite"),
        )

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that a checkpoint should include."""
        return [self._scale, self._good_steps, self._finite]

    @property
    def value(self) -> tf.Tensor:
        """The factor, a float32 scalar."""
        return tf.convert_to_tensor(self._scale)

    @property
    def finite(self) -> tf.Tensor:
        """True if the latest gradients were finite, a bool scalar; read it after them."""
        return tf.cast(tf.convert_to_tensor(self._finite), tf.bool)

    def checked(self, groups: list[Grads]) -> list[Grads]:
        """Returns the gradients, or zeros if any is not finite, and adapts the factor.

        Args:
            groups: lists of gradients, already divided by the factor.

        Returns:
            The same structure. Evaluating any of these gradients also updates the factor.
        """
        flags = []
        for grad in (grad for group in groups for grad in group if grad is not None):
            with tf.device(grad.device):
                flags.append(tf.reduce_all(tf.math.is_finite(grad)))
        finite = tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)
        good_steps = tf.convert_to_tensor(self._good_steps) + 1
        grows = good_steps >= _GROWTH_INTERVAL
        scale = self.value
        grown = tf.where(grows, scale * _FACTOR, scale)
        new_scale = tf.where(finite, grown, tf.maximum(scale / _FACTOR, 1.0))
        kept_steps = tf.where(finite & tf.logical_not(grows), good_steps, tf.zeros_like(good_steps))
        # The factor may change only after every gradient was divided by the old one.
        with tf.control_dependencies([finite, new_scale, kept_steps]):
            updates = [
                self._scale.assign(new_scale),
                self._good_steps.assign(kept_steps),
                self._finite.assign(tf.cast(finite, self._finite.dtype.base_dtype)),
            ]
        with tf.control_dependencies(updates):
            finite = tf.identity(finite)
        return [[None if g is None else _zero_unless(finite, g) for g in group] for group in groups]

    def when_finite(self, apply: Callable[[], Any]) -> tf.Tensor:
        """Calls `apply`, which updates weights, if the latest gradients were finite.

        Args:
            apply: called while a graph is built that already contains the gradients.

        Returns:
            Whether it ran, a bool scalar.
        """

        def apply_and_tell() -> tf.Tensor:
            apply()
            return tf.constant(True)

        return tf.cond(self.finite, apply_and_tell, lambda: tf.constant(False))


def check_compute_dtype(dtype: Any) -> tf.DType | None:
    """Returns the dtype that a pipeline computes in; None leaves the choice to the stages.

    Raises:
        PipelineError: it is not float32, bfloat16 or float16.
    """
    if dtype is None:
        return None
    try:
        found = tf.as_dtype(dtype)
    except TypeError:
        found = None
    if found not in COMPUTE_DTYPES:
        allowed = ", ".join(d.name for d in COMPUTE_DTYPES)
        raise PipelineError(f"compute_dtype is {dtype!r}; allowed are {allowed} and None")
    return found


def cast_floating(tensor: tf.Tensor, dtype: tf.DType | None) -> tf.Tensor:
    """Casts a floating tensor to a dtype, if one is given."""
    if dtype is None or not tensor.dtype.is_floating:
        return tensor
    return tf.cast(tensor, dtype)


def sum_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype for sums of gradients; half precision would lose small ones."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _zero_unless(finite: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
    with tf.device(grad.device):
        return tf.where(finite, grad, tf.zeros_like(grad))
