"""Random numbers that do not depend on the plan.

Inside `plan_free_randomness` every random operation of TensorFlow, however it is reached
(`tf.random.*`, `tf.nn.dropout`, a lingvo or Keras layer), draws what the *whole batch* would
draw, and a microbatch gets its own slice of that draw:

* Stateless operations keep their key; only the counter moves to the slice's first element.
  Philox makes this cheap: element `i` of a 32-bit draw uses counter `i // 4` (Salmon et al.,
  "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
* Stateful operations become stateless ones. Their key is (global step, layer name, number of
  the draw within the layer, seeds given by the user).

Where the batch lies in a random tensor is not guessed: the stage is also traced with the whole
batch, and the dim whose size differs between the two traces is the batch dim.
"""

from __future__ import annotations

# First: it says what is missing.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from pipemesh.randomness.draws import (
    Share,
    SliceOfDraw,
    advance_counter,
    note_draw,
    share_of_draw,
    slice_of_draw,
)
from pipemesh.randomness.patch import install
from pipemesh.randomness.scope import (
    LayerSpan,
    NeedWholeDraws,
    Position,
    Replay,
    Scope,
    WholeDraw,
    WholeDraws,
    alike_layers_scope,
    draw_seed,
    gradient_scope,
    is_active,
    layer_aliases,
    layer_scope,
    layer_spans,
    loop_scope,
    scopes,
    slicewise,
)

__all__ = [
    "LayerSpan",
    "NeedWholeDraws",
    "Position",
    "Replay",
    "Share",
    "SliceOfDraw",
    "WholeDraw",
    "WholeDraws",
    "advance_counter",
    "alike_layers_scope",
    "draw_seed",
    "gradient_scope",
    "is_active",
    "layer_aliases",
    "layer_scope",
    "layer_spans",
    "loop_scope",
    "note_draw",
    "plan_free_randomness",
    "share_of_draw",
    "slice_of_draw",
    "slicewise",
]

# A scope that refuses draws relies on the dispatchers, too.
install()


@contextlib.contextmanager
def plan_free_randomness(
    step: tf.Tensor | None, position: Position | None = None
) -> Iterator[dict[str, WholeDraw]]:
    """Makes all random operations inside depend on step, layer and whole-batch position only.

    Args:
        step: int64 scalar, the global step; None is an error as soon as a number is drawn with
            a key that needs it.
        position: where the microbatch lies; None for the whole batch.

    Yields:
        What has been drawn so far for the whole batch, by name; it fills up inside.

    Raises:
        PipelineError: an operation is called whose numbers cannot be cut into microbatches.

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
