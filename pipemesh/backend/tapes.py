"""What records computations to differentiate them: TensorFlow's tapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# TensorFlow lets nobody else record; the version is pinned to 2.21.
from tensorflow.python.eager import record
from tensorflow.python.ops import gradients_util


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Inside, no tape of the outside records."""
    return record.stop_recording()


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape records what is computed of any of the tensors."""
    return record.should_record_backprop(list(tensors))


def is_recorded_twice(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether gradients of gradients may be asked for.

    Several tapes watch the tensors, or one that may be asked more than once.
    """
    kinds = gradients_util.PossibleTapeGradientTypes(list(tensors))
    return kinds == gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER


def record_call(
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[..., list[Any]],
) -> None:
    """Has all tapes that watch the inputs record how the outputs were computed of them.

    Args:
        outputs: what was computed, unrecorded.
        inputs: of what.
        backward: takes one gradient for each output; returns one or None for each input.
    """
    record.record_operation("pipemesh", list(outputs), list(inputs), backward)


def variables_read() -> Any:
    """Inside, trainable variables that are read are noted.

    Returns:
        A context of an object with the method `watched_variables`.
    """
    return record.VariableWatcher()
