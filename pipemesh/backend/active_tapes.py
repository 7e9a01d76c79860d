"""Which tapes record now."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

# TensorFlow does not tell which tapes record; the version is pinned to 2.21.
from tensorflow.python.eager import backprop


class _Tapes(threading.local):
    """The tapes that record in a thread, the outermost first."""

    def __init__(self) -> None:
        self.active: list[tf.GradientTape] = []


_tapes = _Tapes()


def outermost_tape() -> tf.GradientTape | None:
    """The `tf.GradientTape` of this thread that has recorded longest; None if none records."""
    return _tapes.active[0] if _tapes.active else None


def _noting(push: Any, pop: Any) -> tuple[Any, Any]:
    """Wraps the methods of a tape that begin and end recording."""

    def noting_push(self: tf.GradientTape) -> Any:
        _tapes.active.append(self)
        return push(self)

    def noting_pop(self: tf.GradientTape) -> Any:
        _tapes.active[:] = [tape for tape in _tapes.active if tape is not self]
        return pop(self)

    return noting_push, noting_pop


backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape = _noting(
    backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape
)
