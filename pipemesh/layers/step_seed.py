"""Global step, numbers of calls and seeds of random operations inside pipelined layers."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import lingvo.compat as tf
from lingvo.core import py_utils

from pipemesh import randomness
from pipemesh.backend.gradients import outermost_tape
from pipemesh.backend.graphs import surrounding_graphs
from pipemesh.errors import PipelineError
from pipemesh.randomness.scope import Replay

# The number of calls of each layer, by graph or tape.
_counts: Any = weakref.WeakKeyDictionary()
_in_steps: Any = weakref.WeakKeyDictionary()


class _Recording(threading.local):
    """The numbers of the calls when they were first made, and those that come next."""

    numbers: list[int] | None = None
    coming: Iterator[int] = iter(())


_recording = _Recording()


@contextlib.contextmanager
def recorded_calls(numbers: list[int]) -> Iterator[None]:
    """Gives the calls inside the recorded numbers, and appends the numbers of further calls."""
    saved = _recording.numbers, _recording.coming
    _recording.numbers, _recording.coming = numbers, iter([*numbers])
    try:
        yield
    finally:
        _recording.numbers, _recording.coming = saved


def number_of_call(layer: Any, step: tf.Tensor) -> int:
    """Returns the number of earlier calls of a layer in a step.

    A step is one graph. Eagerly, it is one tape, or without a tape the calls under one global step.
    """
    if (recorded := next(_recording.coming, None)) is not None:
        return recorded
    if not tf.executing_eagerly():
        number = _count_in(_graph_of_step(), layer)
    elif (tape := outermost_tape()) is not None:
        number = _count_in(tape, layer)
    else:
        last, number = _in_steps.get(layer, (None, 0))
        number = number + 1 if last == int(step) else 0
        _in_steps[layer] = int(step), number
    if number and _is_recomputed():
        raise PipelineError(
            f"tf.recompute_grad calls {layer.params.name!r} again to differentiate it, and its "
            "random numbers would be others; use py_utils.RematerializeFn, or a PipeliningLayer "
            "with remat"
        )
    if _recording.numbers is not None:
        _recording.numbers.append(number)
    return number


def _is_recomputed() -> bool:
    """Returns whether TensorFlow's `recompute_grad` calls its function again."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(
        code.co_name == "inner_recompute_grad" and code.co_filename.endswith("custom_gradient.py")
        for code in codes
    )


def _graph_of_step() -> Any:
    # A function inside a function, such as a branch of `tf.cond`, belongs to the same step.
    *inside, outermost = surrounding_graphs(tf.get_default_graph())
    is_function = getattr(outermost, "building_function", False)
    if inside and not is_function and tf.executing_eagerly_outside_functions():
        return inside[-1]
    return outermost


def _count_in(graph_or_tape: Any, layer: Any) -> int:
    counts = _counts.setdefault(graph_or_tape, weakref.WeakKeyDictionary())
    counts[layer] = counts.get(layer, -1) + 1
    return counts[layer]


# Keys of random numbers have the number of the call above the bits of the step.
_STEP_BITS = 40
_OVER_WRITE_COLLECTION = "pipemesh_over_write_global_step"


def GetOverWriteGlobalStep(graph: tf.Graph | None = None) -> Any:
    """Returns the global step that layers of a graph see.

    It is the training step in a pipelined layer too. In `lingvo.core.gpipe` it also counts
    microbatches, but results must not depend on their number.

    Args:
        graph: the graph; the current one by default.

    Returns:
        The step from `SetOverWriteGlobalStep`, else lingvo's global step, which may be None.
    """
    steps = _steps_of(graph)
    return steps[0] if steps else py_utils.GetGlobalStep()


def SetOverWriteGlobalStep(tensor: Any, graph: tf.Graph | None = None) -> None:
    """Sets the result of `GetOverWriteGlobalStep` for a graph.

    Args:
        tensor: the step, an integer scalar.
        graph: the graph; the current one by default.
    """
    _steps_of(graph)[:] = [tensor]


def _steps_of(graph: tf.Graph | None = None) -> list[Any]:
    """Returns the steps that were set for a graph: one or none."""
    current: Any = graph or tf.get_default_graph()
    return current.get_collection_ref(_OVER_WRITE_COLLECTION)


def GenerateStepSeedPair(p: Any, unused_global_step: Any = None, op_seed: Any = None) -> tf.Tensor:
    """Returns seeds for a stateless random operation, keyed by step and layer.

    Replaces `py_utils.GenerateStepSeedPair` in pipelined layers.

    Args:
        p: params of the layer with `random_seed` and `is_inference`.
        unused_global_step: kept for callers of `lingvo.core.gpipe`.
        op_seed: an integer or scalar tensor that distinguishes operations of one layer.

    Returns:
        A tensor of shape [2], int64, on TPU int32.
    """
    del unused_global_step
    dtype = tf.int32 if py_utils.use_tpu() else tf.int64
    if p.is_inference and p.random_seed is None:
        # A model that is random in inference must differ from call to call. So a stateful operation
        # draws these seeds; no scope of keyed random numbers replaces it.
        return tf.raw_ops.RandomUniformInt(
            shape=[2], minval=tf.zeros([], dtype), maxval=tf.constant(dtype.max, dtype)
        )
    if randomness.is_active():
        seeds = tf.cast(randomness.draw_seed() % dtype.max, dtype)
    else:
        with tf.name_scope("op_seed") as scope:
            name_seed = py_utils.GenerateSeedFromName(scope)
        seeds = tf.stack([tf.cast(GetOverWriteGlobalStep(), dtype), tf.cast(name_seed, dtype)])
    if p.random_seed is not None:
        seeds += tf.cast(p.random_seed, dtype)
    if op_seed is not None:
        seeds += tf.cast(op_seed, dtype)
    return seeds


def current_step() -> tf.Tensor | None:
    """Returns the global step as an int64 scalar, or None if there is none."""
    step = GetOverWriteGlobalStep()
    return None if step is None else tf.cast(tf.convert_to_tensor(step), tf.int64)


def step_of_call(layer: Any) -> tf.Tensor | None:
    """Returns the key of the random numbers of this call of a layer; ask once for each call.

    It is the global step, with the number of earlier calls in the upper bits, or None without a
    step. Inside randomness it is the step alone, because there all draws of a layer are counted.
    """
    step = current_step()
    if step is None or randomness.is_active():
        return step
    return step + (number_of_call(layer, step) << _STEP_BITS)


def global_step_in(step: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the global step in a result of `step_of_call`."""
    return None if step is None else step % (1 << _STEP_BITS)


def name_in_task(layer: Any) -> str:
    """Returns the path of a layer in its model, without the model's name."""
    return layer.path.partition(".")[2]


def _rematerialize(original: Any) -> Any:
    """Wraps `py_utils.RematerializeFn` so that recomputation draws the same numbers."""

    def rematerialize(fn: Any, *xs: Any) -> Any:
        replay, numbers = Replay(), []

        def call(*args: Any) -> Any:
            with replay.enter(args[len(xs) :]), recorded_calls(numbers):
                return fn(*args[: len(xs)])

        # The function must not capture tensors.
        return original(call, *xs, *replay.tensors)

    rematerialize.__name__, rematerialize.__doc__ = original.__name__, original.__doc__
    return rematerialize


py_utils.RematerializeFn = _rematerialize(py_utils.RematerializeFn)


@contextlib.contextmanager
def CellFnFPropOpReplacementWrapper() -> Iterator[None]:
    """Makes lingvo's layers take their seeds from `GenerateStepSeedPair` of this module inside.

    `lingvo.core.gpipe` has it for cells that run where lingvo's global step is missing. A
    `PipeliningLayer` needs none of it; it is for models with loops of their own. Unlike lingvo's,
    it restores the function after an error, too.

    Example:
        >>> from lingvo.core import py_utils
        >>> with CellFnFPropOpReplacementWrapper():
        ...     py_utils.GenerateStepSeedPair is GenerateStepSeedPair
        True
    """
    saved = py_utils.GenerateStepSeedPair
    py_utils.GenerateStepSeedPair = GenerateStepSeedPair
    try:
        yield
    finally:
        py_utils.GenerateStepSeedPair = saved


@contextlib.contextmanager
def keyed_seeds(step: tf.Tensor | None = None) -> Iterator[None]:
    """Makes lingvo's layers take their seeds, and `step` if given, from this module."""
    steps = _steps_of()
    saved_steps = list(steps)
    with CellFnFPropOpReplacementWrapper(), contextlib.ExitStack() as stack:
        if step is not None:
            steps[:] = [step]
            stack.enter_context(py_utils.GlobalStepContext(step))
        try:
            yield
        finally:
            steps[:] = saved_steps


@contextlib.contextmanager
def whole_batch_randomness(step: tf.Tensor | None = None) -> Iterator[None]:
    """Makes random numbers inside equal to those of a pipeline; inside a pipeline changes nothing.

    `step` is a result of `step_of_call`, by default the global step.
    """
    with contextlib.ExitStack() as stack:
        if not randomness.is_active():
            step = current_step() if step is None else step
            stack.enter_context(randomness.plan_free_randomness(step))
            stack.enter_context(keyed_seeds())
        yield
