"""The condition that ends a recurrent net early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.time.cell import ArgumentSpecs, Structures
from pipemesh.recurrent.time.traced_function import TracedFunction


class StopCondition:
    """A condition that is checked before each time step.

    Args:
        stop_fn: `(t, theta, state) -> bool tensor`; stops when all elements are true.
        structures: of the cell's arguments.
        specs: shapes and dtypes of the cell's arguments.

    Attributes:
        captures: the outside tensors that it uses.
    """

    def __init__(
        self,
        stop_fn: Callable[[tf.Tensor, Any, Any], Any],
        structures: Structures,
        specs: ArgumentSpecs,
    ) -> None:
        def run(t: tf.Tensor, *flat: tf.Tensor) -> tf.Tensor:
            theta = structures.theta.pack(flat[: len(specs.theta)])
            state = structures.state.pack(flat[len(specs.theta) :])
            stop = tf.convert_to_tensor(stop_fn(tf.cast(t, tf.int64), theta, state))
            if stop.dtype != tf.bool:
                raise PipelineError(f"stop_fn returned {stop.dtype.name}; it must return bool")
            return tf.reduce_all(stop)

        time = tf.TensorSpec([], tf.int32)
        self._function = TracedFunction(run, [time, *specs.theta, *specs.state], "stop_fn")
        self.captures = self._function.captures

    def __call__(
        self,
        t: tf.Tensor,
        theta: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        captures: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Returns True (a bool scalar) to stop before time `t` (int32 scalar)."""
        return self._function(t, *theta, *state, captures=captures)
