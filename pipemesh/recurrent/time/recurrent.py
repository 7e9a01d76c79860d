"""A recurrent net: one cell, applied along time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.time.cell import (
    Arguments,
    Cell,
    TracedCell,
    stop_condition,
)
from pipemesh.recurrent.time.time_loop import (
    Span,
    TimeLoop,
    check_lengths,
    padding_bounds,
    run_loop,
    sequence_length,
)

Nested = Any


def Recurrent(
    theta: Nested,
    state0: Nested,
    inputs: Nested,
    cell_fn: Callable[[Nested, Nested, Nested], tuple[Nested, Nested]],
    cell_grad: Callable[[Nested, Nested, Nested, Nested, Nested], Sequence[Nested]] | None = None,
    cell_type: str | None = None,
    stop_fn: Callable[[tf.Tensor, Nested, Nested], tf.Tensor] | None = None,
    extras: Nested = None,
    check_stateful_ops: bool = False,
    accumulator_layer: Any = None,
    allow_implicit_capture: bool = False,
    allowed_tensor_captures: Sequence[tf.Tensor] | None = None,
    *,
    return_acc_extras: bool = False,
) -> tuple[Nested, ...]:
    """Applies a cell along time and keeps its states, not its activations.

    Outputs and gradients are equal to those of this loop::

        state = state0
        for t in range(length):
            state, extras = cell_fn(theta, state, inputs[t])
            acc_state[t] = state
        return acc_state, state

    The cell is traced once, and the graph does not grow with the length. The backward pass
    recomputes each time step from its stored state. Gradients of half-precision theta are summed in
    float32. Call it in TF1 graphs, in a `tf.function` or eagerly. Eager calls trace the cell each
    time, so a `tf.function` around them is faster. The signature is that of
    `lingvo.core.recurrent.Recurrent`; the README of this package lists the differences.

    All of theta, states, inputs and extras are nested structures: dicts, lists, tuples, lingvo's
    NestedMap. None may replace a tensor and is kept. A cell gets the same containers, with its
    own tensors. Tensors without derivatives, such as integers, have no gradient.

    Args:
        theta: weights.
        state0: the state before the first time step.
        inputs: tensors whose dim 0 is time, at least one. They may be a dict with the key
            `padding`, of shape [time, ...], where True or a nonzero number means padding. Leading
            and trailing time steps that are padding for all examples are skipped: their states in
            `acc_state` are zeros.
        cell_fn: `(theta, state0, inputs) -> (state1, extras)` for one time step; state1 is like
            state0 in nesting, dtypes and shapes. It must have no side effects.
        cell_grad: `(theta, state0, inputs, extras, dstate1) -> (dtheta, dstate0, dinputs)`, the
            gradient of one time step, by default derived automatically. An optional fourth
            result must be None. Extras are kept for it. None in its results means no gradient.
        cell_type: names the cell in errors.
        stop_fn: `(t, theta, state0) -> stop`, called before each time step; `t` is an int64 scalar.
            Once all of the bool tensor `stop` is true, that time step and all later ones are
            skipped.
        extras: an example of the extras; needed only if their shapes are not static and there may
            be no time step at all.
        check_stateful_ops: ignored, for compatibility with lingvo: operations with state are always
            errors.
        accumulator_layer: a layer with `GetAccumulatorValues` and `SetAccumulatorValues`. Its
            accumulators go from time step to time step, without gradient, and to the layer.
        allow_implicit_capture: whether the cell may use tensors and variables that are not
            arguments. They get gradients. Not supported with a `cell_grad`. The cell may always
            read variables without a gradient, such as the global step.
        allowed_tensor_captures: if given, the only outside tensors that the cell may use.
        return_acc_extras: whether to return the extras, too. With a `cell_grad` a gradient through
            them is an error; use `tf.stop_gradient` to avoid it.

    Returns:
        The states over time (dim 0), and the final state, both nested like state0; and, if
        requested, the extras over time.

    Raises:
        PipelineError: the inputs' lengths differ, the cell has side effects, captures a tensor that
            it may not use, or returns an invalid structure.
        LookupError: a gradient is differentiated again, or so are extras with a `cell_grad`.

    Example:
        >>> import tensorflow as tf
        >>> def cell(theta, state, inputs):
        ...     return {"sum": theta["decay"] * state["sum"] + inputs["x"]}, ()
        >>> decay = tf.Variable(0.5)
        >>> with tf.GradientTape() as tape:
        ...     over_time, final = Recurrent(
        ...         {"decay": decay}, {"sum": 0.0}, {"x": tf.constant([4.0, 2.0, 1.0])}, cell
        ...     )
        >>> [float(x) for x in over_time["sum"]], float(final["sum"])
        ([4.0, 4.0, 3.0], 3.0)
        >>> float(tape.gradient(final["sum"], decay))
        6.0
    """
    del check_stateful_ops
    name = cell_type or getattr(cell_fn, "__name__", type(cell_fn).__name__)
    accumulators0 = (
        accumulator_layer.GetAccumulatorValues() if accumulator_layer is not None else ()
    )
    structures = Arguments(
        Structure(theta, "theta"),
        Structure(state0, "state0"),
        Structure(accumulators0, "the accumulators"),
        Structure(inputs, "inputs"),
    )
    parts = (theta, state0, accumulators0, inputs)
    arguments = Arguments(*(s.tensors(part) for s, part in zip(structures, parts, strict=True)))
    if not arguments.state:
        raise PipelineError("state0 has no tensor in it, so that there is nothing to compute")
    allowed = list(allowed_tensor_captures or ())

    def may_capture(tensor: tf.Tensor) -> bool:
        if cell_grad is not None:
            return False
        return any(tensor is x for x in allowed) if allowed else allow_implicit_capture

    with tf.name_scope("recurrent"):
        arguments = arguments._replace(
            inputs=_of_one_length(arguments.inputs, structures.inputs.leaf_names)
        )
        step_inputs = [tf.TensorSpec(x.shape[1:], x.dtype) for x in arguments.inputs]
        specs = Arguments(*[*map(specs_of, arguments[:3]), step_inputs])
        device = tf.zeros([]).device
        cell = Cell(name, cell_fn, cell_grad, accumulator_layer, extras, may_capture, device)
        traced = TracedCell(cell, structures, specs)
        stop = stop_condition(stop_fn, structures, specs) if stop_fn else None
        loop = TimeLoop(traced, stop, return_acc_extras)
        keep_alive(loop)
        packed = structures.inputs.pack(arguments.inputs)
        bounds = padding_bounds(packed, sequence_length(arguments.inputs))
        span = Span(tf.constant(0), *bounds)
        acc_state, _, state, accumulators, acc_extras = run_loop(
            loop, arguments, loop.captures, span
        )
    if accumulator_layer is not None:
        accumulator_layer.SetAccumulatorValues(structures.accumulators.pack(accumulators))
    results = structures.state.pack(acc_state), structures.state.pack(state)
    return (*results, traced.extras.pack(acc_extras)) if return_acc_extras else results


def _of_one_length(inputs: list[tf.Tensor], names: list[str]) -> list[tf.Tensor]:
    """Returns the inputs after a check that their dim 0 is the same."""
    check_lengths(inputs, names)
    unknown = [number for number, x in enumerate(inputs) if x.shape[0] is None]
    if not unknown or len(inputs) == 1:
        return inputs
    length = sequence_length(inputs)
    checks = [
        tf.debugging.assert_equal(
            tf.shape(inputs[number])[0], length, f"{names[number]} has another length in time"
        )
        for number in unknown
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [tf.identity(x) for x in inputs]
