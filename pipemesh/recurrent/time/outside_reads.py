"""Variables that a traced function reads: each is read once, outside of the function.

A variable may change between the passes of a loop, as the global step does. If the loop read it,
the backward pass would use another value. Read outside, variables are tensors that the function
captures, with a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import drop_unused_captures, reads_replaced


class OutsideReads:
    """A reader of variables in the scope where it is created, for a function traced inside."""

    def __init__(self) -> None:
        # A graph, or None in eager mode.
        self._place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # The handle is kept so that its id is not reused.
        self._values: dict[int, tuple[Any, tf.Tensor]] = {}

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Replaces reads of outside variables, in the graph being traced, by their values.

        Only in the graph itself: a branch or a loop inside it has its own graph.
        """
        graph = tf.compat.v1.get_default_graph()
        with reads_replaced(self._value):
            yield
        drop_unused_captures(graph, self._values)

    def _value(self, handle: Any, dtype: tf.DType) -> tf.Tensor:
        if id(handle) not in self._values:
            with tf.init_scope() if self._place is None else self._place.as_default():
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            self._values[id(handle)] = handle, value
        return self._values[id(handle)][1]

    def read(self, captured: tf.Tensor) -> tuple[Any, tf.Tensor] | None:
        """Reads the variable of a captured value in the scope where this object was created.

        Returns:
            The variable's handle and its value; None if the captured value is not from a variable.
        """
        found = (handle for handle, value in self._values.values() if value is captured)
        handle = next(found, None)
        if handle is None or self._place is not None:
            return None if handle is None else (handle, captured)
        # An eager tape does not record operations in an `init_scope`.
        return handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=captured.dtype)
