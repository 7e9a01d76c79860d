"""How often a layer was called in a step: two calls draw different random numbers."""

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

# What TensorFlow's `recompute_grad` calls its function in for the second time.
_RECOMPUTES = ("custom_gradient.py", "inner_recompute_grad")

# For each graph or tape how often each layer was called in it.
_counts: Any = weakref.WeakKeyDictionary()
_in_steps: Any = weakref.WeakKeyDictionary()


class _Recording(threading.local):
    """The numbers that calls had when they were made for the first time, and how many came."""

    numbers: list[int] | None = None
    at: int = 0


_recording = _Recording()


@contextlib.contextmanager
def recorded_calls(numbers: list[int]) -> Iterator[None]:
    """Calls inside have the given numbers, as far as there are some; further ones are appended.

    Args:
        numbers: empty where something is computed for the first time; the same list where it is
            computed again.
    """
    saved = _recording.numbers, _recording.at
    _recording.numbers, _recording.at = numbers, 0
    try:
        yield
    finally:
        _recording.numbers, _recording.at = saved


def number_of_call(layer: Any, step: tf.Tensor) -> int:
    """Counts the calls of a layer in a step.

    That are those that stand in one graph. Of eager calls nobody can say whether they belong to one
    step or repeat it; those under one tape are counted, and so are those without a tape while the
    global step is the same.

    Args:
        layer: that is called now.
        step: the global step.

    Returns:
        How many calls came before.

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
    # Functions inside of a function, of `tf.cond` say, belong to the same step.
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
