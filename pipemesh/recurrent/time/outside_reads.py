"""Variables that a function reads while it is traced: read outside of it, each once.

A loop that read them itself would find another value in its backward pass if the variable had
changed in between, as the global step does. Read outside, they are tensors that the function
captures, and have a gradient like those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import drop_unused_captures, reads_replaced


class OutsideReads:
    """Reads variables for a function that is traced inside of the place where this is made."""

    def __init__(self) -> None:
        # A graph, or None where code runs eagerly.
        self._place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # The handle is kept, so that its id stays its own.
        self._values: dict[int, tuple[Any, tf.Tensor]] = {}

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Whatever reads a variable of the outside in the graph being traced gets its value.

        In the graph itself: a branch or a loop inside of it has a graph of its own.
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
        """Reads the variable that stands behind a captured value, where this was made.

        Returns:
            The variable's handle and its value; None if there is no variable behind it.
        """
        found = (handle for handle, value in self._values.values() if value is captured)
        handle = next(found, None)
        if handle is None or self._place is not None:
            return None if handle is None else (handle, captured)
        # An eager tape records nothing of what happens in an `init_scope`.
        return handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=captured.dtype)
