"""Settings of a run of a pipeline, apart from its schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend.operations import on_each
from pipemesh.errors import PipelineError
from pipemesh.recurrent.remat import AnyRemat, policy_of
from pipemesh.recurrent.stage import Grads
from pipemesh.recurrent.watch.clock import ActionClock
from pipemesh.recurrent.watch.finite_values import CHECKS, OF_GRADIENTS
from pipemesh.recurrent.watch.marks import Marks

# Any object with their method `stamp`.
Clock = ActionClock | Marks
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

        values: list[Any] = [INITIAL_SCALE, np.int64(0), True]
        names = ("loss_scale", "good_steps", "finite")
        return cls(
            *(tf.Variable(v, trainable=False, name=n) for v, n in zip(values, names, strict=True))
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
        grads = [grad for group in groups for grad in group if grad is not None]
        devices = [grad.device for grad in grads]
        flags = on_each(devices, lambda grad: tf.reduce_all(tf.math.is_finite(grad)), grads)
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
    """Returns the dtype that a pipeline computes in; None leaves the choice to the stages."""
    if dtype is None:
        return None
    try:
        parsed = tf.as_dtype(dtype)
    except TypeError:
        parsed = None
    if parsed not in COMPUTE_DTYPES:
        allowed = ", ".join(d.name for d in COMPUTE_DTYPES)
        raise PipelineError(f"compute_dtype is {dtype!r}; allowed are {allowed} and None")
    return parsed


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


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a run of a pipeline; the defaults change no results.

    Attributes:
        batch_dim: the dim along which inputs are split and outputs joined.
        sequence_dim: the dim along which inputs are split and outputs joined if the schedule has
            sequence slices. Every slice gets an input without this dim as a whole.
        remat: `full` keeps only the stage inputs of each microbatch and recomputes the stage in the
            backward pass. `none` keeps everything that the backward pass needs. `except_last`
            recomputes nothing for a microbatch whose backward pass directly follows its forward
            pass. `twice` is `full`, but keeps only gradients between the halves `I` and `W` of a
            backward pass and recomputes the stage again in `W`. `Selective(predicate)` recomputes
            the layers that the predicate chooses. `ByStage(policies)`, or names joined by commas,
            sets a policy for each stage. An `R` of the schedule recomputes its stage in any case.
        loop: True makes the schedule one loop of the graph, which grows only with the number of
            stages. False gives each action its own operations, which makes steps slightly shorter.
            None chooses a loop if all actions together would have more than 30,000 nodes, or more
            than 10,000 with at least 100 each. Also, the loop must have at most half as many.
        compute_dtype: `float32`, `bfloat16` or `float16`. Floating weights and inputs are cast to
            it on their device before the stages use them, except weights of stages with their own
            dtypes. Gradients are summed over microbatches in the dtype of the weights (float32 for
            half-precision weights) and returned in the dtype of the weights. None casts nothing.
        uncast_inputs: indices of the inputs that keep their dtype, such as labels.
        loss_scale: multiplies the loss within the pipeline; float16 needs it.
        check_numerics: `results` raises `tf.errors.InvalidArgumentError` if the loss (or an output,
            if the loss is outside) or a gradient is not finite. `all` also names the layer and
            microbatch where that began, which makes the graph several times as large. `loss` and
            `forward` are the same without gradients, for a scaled loss whose gradients may
            overflow. `off` checks nothing. The default is `loss` with a `loss_scale`, else
            `results`. Every result of `pipeline` or `pipeline_loss`, and every gradient, waits for
            the check.
        clock: records when each action runs.
        strict_devices: raises an error if an operation of a stage is pinned to another device, or
            has no kernel for the device of its stage; see also `placement`.
        compile: lets XLA compile what each action computes, as one computation; random numbers and
            checks stay outside of it, so that results are the same to rounding. Alike stages share
            one, which TensorFlow compiles once for each device, at its first call. A warning names
            what XLA does not take, which runs as without it. On CPUs steps become longer.
        noted_run: is called with the run before it is performed, for `memory_of` and
            `transfers_of`.
        slice_lengths: the positions of each slice; empty for equal slices. With lengths that differ
            stages are traced once for each slice, and the schedule cannot be a loop.
    """

    batch_dim: int = 0
    sequence_dim: int = 1
    remat: AnyRemat = "full"
    loop: bool | None = None
    compute_dtype: Any = None
    uncast_inputs: frozenset[int] = frozenset()
    loss_scale: LossScale | None = None
    check_numerics: str | None = None
    clock: Clock | None = None
    strict_devices: bool = False
    compile: bool = False
    noted_run: Callable[[Any], None] | None = None
    slice_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        policy_of(self.remat)
        if self.loop not in (None, False, True):
            raise PipelineError(
                f"loop={self.loop!r} is invalid. Use True, False, or None to choose by size."
            )
        if not isinstance(self.compile, bool):
            raise PipelineError(f"compile={self.compile!r} is invalid. Use True or False.")
        default = "results" if self.loss_scale is None else "loss"
        object.__setattr__(self, "check_numerics", self.check_numerics or default)
        if self.check_numerics not in CHECKS:
            raise PipelineError(
                f"check_numerics is {self.check_numerics!r}; allowed are {', '.join(CHECKS)}"
            )
        if self.check_numerics in OF_GRADIENTS and self.loss_scale is not None:
            raise PipelineError(
                f"check_numerics is {self.check_numerics!r}, but a loss_scale makes gradients "
                "overflow now and then; use 'forward' or 'loss', or no loss_scale"
            )
        object.__setattr__(self, "compute_dtype", check_compute_dtype(self.compute_dtype))
