"""Random numbers that do not depend on the plan.

Inside `plan_free_randomness` every random operation of TensorFlow, however it is called
(`tf.random.*`, `tf.nn.dropout`, a lingvo or Keras layer), draws the numbers of the *whole batch*,
and a microbatch gets its slice of them:

* Stateless operations keep their key; only the counter moves to the slice's first element. Philox
  makes this cheap: element `i` of a 32-bit draw uses counter `i // 4` (Salmon et al., "Parallel
  Random Numbers: As Easy as 1, 2, 3", 2011).
* Stateful operations become stateless. Their key is (global step, layer name, number of the draw
  within the layer, seeds given by the user).

The batch dim of a random tensor is not guessed: the stage is also traced with the whole batch, and
the dim whose size differs between the two traces is the batch dim.
"""

from __future__ import annotations

# First: it says what is missing.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from pipemesh.randomness.patch import install
from pipemesh.randomness.scope import (
    Position,
    Scope,
    WholeDraw,
    draw_seed,
    is_active,
    layer_scope,
    scopes,
)

__all__ = [
    "draw_seed",
    "is_active",
    "layer_scope",
    "plan_free_randomness",
]

# A scope that refuses draws relies on the dispatchers, too.
install()


@contextlib.contextmanager
def plan_free_randomness(
    step: tf.Tensor | None, position: Position | None = None
) -> Iterator[dict[str, WholeDraw]]:
    """Makes random operations inside depend only on step, layer and position in the whole batch.

    Args:
        step: int64 scalar, the global step. With None, a draw whose key needs the step is an error.
        position: the position of the microbatch, set by a pipeline; None for the whole batch.

    Yields:
        The whole batch's draws so far, by name; it fills up inside.

    Raises:
        PipelineError: the numbers of an operation cannot be cut into microbatches.

    Example:
        >>> import tensorflow as tf
        >>> with plan_free_randomness(step=tf.constant(7, tf.int64)):
        ...     a = tf.nn.dropout(tf.ones([4]), rate=0.5)
        >>> with plan_free_randomness(step=tf.constant(7, tf.int64)):
        ...     b = tf.nn.dropout(tf.ones([4]), rate=0.5)
        >>> bool(tf.reduce_all(a == b))
        True
    """
    scope = Scope(step, position)
    scopes.stack.append(scope)
    try:
        yield scope.drawn
    finally:
        scopes.stack.pop()
