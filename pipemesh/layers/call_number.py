"""The number of times that a layer was called in a step: two calls draw different numbers."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import lingvo.compat as tf

from pipemesh.backend.gradients import outermost_tape
from pipemesh.errors import PipelineError

# The file and the function in which TensorFlow's `recompute_grad` calls its function again.
_RECOMPUTES = ("custom_gradient.py", "inner_recompute_grad")

# The number of calls of each layer, by graph or tape.
_counts: Any = weakref.WeakKeyDictionary()
_in_steps: Any = weakref.WeakKeyDictionary()


class _Recording(threading.local):
    """The numbers of the calls when they were first made, and the position in them."""

    numbers: list[int] | None = None
    at: int = 0


_recording = _Recording()


@contextlib.contextmanager
def recorded_calls(numbers: list[int]) -> Iterator[None]:
    """Gives the calls inside the recorded numbers, and appends the numbers of further calls."""
    saved = _recording.numbers, _recording.at
    _recording.numbers, _recording.at = numbers, 0
    try:
        yield
    finally:
        _recording.numbers, _recording.at = saved


def number_of_call(layer: Any, step: tf.Tensor) -> int:
    """Returns the number of earlier calls of a layer in a step.

    A step is one graph. Eagerly, it is one tape, or without a tape the calls under one global step.

    Raises:
        PipelineError: `tf.recompute_grad` calls the layer again.
    """
    numbers = _recording.numbers
    if numbers is not None and _recording.at < len(numbers):
        number = numbers[_recording.at]
    else:
        if not tf.executing_eagerly():
            number = _count_in(_graph_of_step(), layer)
        elif (tape := outermost_tape()) is not None:
            number = _count_in(tape, layer)
        else:
            number = _count_in_step(layer, int(step))
        if number and _is_recomputed():
            raise PipelineError(
                f"tf.recompute_grad calls {layer.params.name!r} again to differentiate it, and its "
                "random numbers would be others; use py_utils.RematerializeFn, or a "
                "PipeliningLayer with remat"
            )
        if numbers is not None:
            numbers.append(number)
    _recording.at += 1
    return number


def _count_in_step(layer: Any, step: int) -> int:
    last, number = _in_steps.get(layer, (None, 0))
    number = number + 1 if last == step else 0
    _in_steps[layer] = step, number
    return number


def _graph_of_step() -> Any:
    graph: Any = tf.get_default_graph()
    # A function inside a function, such as a branch of `tf.cond`, belongs to the same step.
    while getattr(graph, "building_function", False):
        outer = getattr(graph, "outer_graph", None)
        if outer is None or (
            not getattr(outer, "building_function", False)
            and tf.executing_eagerly_outside_functions()
        ):
            break
        graph = outer
    return graph


def _count_in(graph_or_tape: Any, layer: Any) -> int:
    counts = _counts.setdefault(graph_or_tape, weakref.WeakKeyDictionary())
    counts[layer] = counts.get(layer, -1) + 1
    return counts[layer]


def _is_recomputed() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_RECOMPUTES[0]) and code.co_name == _RECOMPUTES[1]:
            return True
        frame = frame.f_back
    return False
