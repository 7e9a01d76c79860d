"""The two loops over time of a recurrent net: forward, and backward in reverse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.structure import is_differentiable
from pipemesh.recurrent.precision import sum_dtype
from pipemesh.recurrent.time.cell import Arguments, StepGradient, StepGradients, TracedCell, groups
from pipemesh.recurrent.time.cell_out import CellOut, CellOutGradient, CellOutGradients
from pipemesh.recurrent.time.rows import Rows
from pipemesh.recurrent.time.stop_condition import StopCondition

# The recomputation of earlier time steps does not wait for the gradient. Without this limit many
# time steps would run at once, each with all of its activations.
_BACKWARD_STEPS_AT_ONCE = 2


class Span(NamedTuple):
    """The time steps of the inputs to compute; the inputs may be a part of a sequence.

    Attributes:
        first: int32 scalar, the time of the inputs' first time step in the whole sequence.
        begin: int32 scalar, the first time step to compute, as an index of the inputs.
        end: int32 scalar, the index after the last time step to compute.
    """

    first: tf.Tensor
    begin: tf.Tensor
    end: tf.Tensor


class Captures(NamedTuple):
    """Values of the outside tensors that a loop uses, by the function that uses them."""

    cell: Sequence[tf.Tensor]
    out: Sequence[tf.Tensor]
    stop: Sequence[tf.Tensor]


class Forward(NamedTuple):
    """The results of the forward loop.

    Attributes:
        acc_state: for each state tensor its values over time.
        acc_out: for each result of `out` its values over time.
        state: the final state.
        accumulators: their final values.
        acc_extras: for each extra its values over time, as a handle of `Rows`.
        acc_accumulators: their values before each time step, as handles.
        span: the computed time steps.
    """

    acc_state: list[tf.Tensor]
    acc_out: list[tf.Tensor]
    state: list[tf.Tensor]
    accumulators: list[tf.Tensor]
    acc_extras: list[tf.Tensor]
    acc_accumulators: list[tf.Tensor]
    span: Span


class ResultGradients(NamedTuple):
    """Gradients of the differentiable results; empty lists where a result has none."""

    acc_state: list[tf.Tensor]
    acc_out: list[tf.Tensor]
    state: list[tf.Tensor]
    acc_extras: list[tf.Tensor]


class Gradients(NamedTuple):
    """Gradients of all arguments of the loop, None where there is none."""

    theta: list[tf.Tensor | None]
    captures: list[tf.Tensor | None]
    out_captures: list[tf.Tensor | None]
    state: list[tf.Tensor | None]
    inputs: list[tf.Tensor | None]


@dataclasses.dataclass
class TimeLoop:
    """A loop of a cell over time.

    Attributes:
        cell: the cell.
        stop: the stop condition, or None.
        return_extras: True if the extras are requested.
        extras_shapes: int32 vectors, the shapes of the extras; -1 for unknown sizes.
        out: a function of each time step's state, or None.
        reads_state: True if the cell reads its input state. If not, the backward pass does not need
            the states.
    """

    cell: TracedCell
    stop: StopCondition | None
    return_extras: bool
    extras_shapes: Sequence[tf.Tensor | np.ndarray]
    out: CellOut | None = None
    reads_state: bool = True

    @property
    def captures(self) -> Captures:
        """The outside tensors that it uses."""
        return Captures(
            self.cell.captures,
            self.out.captures if self.out else [],
            self.stop.captures if self.stop else [],
        )

    def forward(self, given: Arguments, captures: Captures, span: Span) -> Forward:
        """Computes time steps.

        Args:
            given: flat lists of tensors; the inputs over time, in dim 0.
            captures: values of `captures`.
            span: the time steps to compute, until the stop condition is true.
        """
        size = sequence_length(given.inputs)
        rows = [
            [Rows.like(x, size) for x in given.state],
            [Rows.like(x, size) for x in given.accumulators],
            self.extras_rows(size) if self.cell.cell.gradient or self.return_extras else [],
            self.out.rows(size) if self.out else [],
        ]

        def proceed(t: tf.Tensor, state: list[tf.Tensor], *_: object) -> tf.Tensor:
            if self.stop is None:
                return t < span.end
            stop = self.stop(span.first + t, given.theta, state, captures.stop)
            return tf.logical_and(t < span.end, tf.logical_not(stop))

        def body(
            t: tf.Tensor,
            state: list[tf.Tensor],
            accumulators: list[tf.Tensor],
            acc: list[list[tf.Tensor]],
        ) -> Any:
            inputs = [x[t] for x in given.inputs]
            arguments = Arguments(given.theta, state, accumulators, inputs)
            step = self.cell.step(span.first + t, arguments, captures.cell)
            out = self.out(span.first + t, step.state, captures.out) if self.out else []
            # Accumulators are stored as the cell finds them; the next time step finds the new ones.
            kept = [step.state, accumulators, step.extras if rows[2] else [], out]
            acc = [_write(*columns, t) for columns in zip(rows, acc, kept, strict=True)]
            return t + 1, step.state, step.accumulators, acc

        new = [[row.new() for row in part] for part in rows]
        end, state, accumulators, acc = tf.while_loop(
            proceed, body, (span.begin, given.state, given.accumulators, new)
        )
        acc_state, acc_out = (
            [row.stack(handle) for row, handle in zip(rows[i], acc[i], strict=True)] for i in (0, 3)
        )
        computed = span._replace(end=end)
        return Forward(acc_state, acc_out, state, accumulators, acc[2], acc[1], computed)

    def stacked_extras(self, given: Arguments, forward: Forward) -> list[tf.Tensor]:
        """Returns the extras over time, if requested."""
        if not self.return_extras:
            return []
        rows = self.extras_rows(sequence_length(given.inputs))
        return [row.stack(handle) for row, handle in zip(rows, forward.acc_extras, strict=True)]

    def extras_rows(self, size: tf.Tensor) -> list[Rows]:
        """Returns storage for the extras over time."""
        specs = zip(self.extras_shapes, self.cell.extras_specs, strict=True)
        return [Rows(shape, spec.shape, spec.dtype, size) for shape, spec in specs]

    def backward(
        self, given: Arguments, captures: Captures, forward: Forward, results: ResultGradients
    ) -> Gradients:
        """Runs the computed time steps backward, given gradients of the results."""
        gradient = StepGradient(self.cell, with_extras=bool(results.acc_extras))
        out_gradient = CellOutGradient(self.out) if self.out else None
        keep_alive((gradient, out_gradient))
        size = sequence_length(given.inputs)
        first, begin, end = forward.span
        accumulator_rows = [Rows.like(x, size) for x in given.accumulators]
        extras_rows = self.extras_rows(size) if self.cell.cell.gradient else []
        differentiable = [i for i, x in enumerate(given.state) if is_differentiable(x)]
        sources = [*given.theta, *captures.cell, *captures.out]
        found = _summed(gradient.found, out_gradient.found if out_gradient else None)
        summed = [i for i, grad in enumerate(found) if grad is not None]
        with_row = [i for i, grad in enumerate(gradient.found.inputs) if grad is not None]
        input_rows = [
            Rows(tf.shape(x)[1:], x.shape[1:], x.dtype, size)
            for x in (given.inputs[i] for i in with_row)
        ]

        def state_before(t: tf.Tensor) -> list[tf.Tensor]:
            if not self.reads_state:
                return given.state
            before = tf.maximum(t - 1, 0)
            return [
                tf.ensure_shape(tf.where(t > begin, x[before], x0), x0.shape)
                for x, x0 in zip(forward.acc_state, given.state, strict=True)
            ]

        def body(t: tf.Tensor, d_state: Any, totals: Any, d_inputs: Any) -> Any:
            accumulators = _read(accumulator_rows, forward.acc_accumulators, t)
            extras = _read(extras_rows, forward.acc_extras, t) if self.cell.cell.gradient else []
            if results.acc_state:
                d_state = [d + x[t] for d, x in zip(d_state, results.acc_state, strict=True)]
            out_grads = None
            if out_gradient:
                # If the cell does not read its state, the states over time need not be kept.
                reads = out_gradient.reads_state
                state1 = [x[t] for x in forward.acc_state] if reads else given.state
                d_out = [x[t] for x in results.acc_out]
                out_grads = out_gradient(first + t, state1, captures.out, d_out)
                added = [out_grads.state[i] for i in differentiable]
                d_state = [d if x is None else d + x for d, x in zip(d_state, added, strict=True)]
            grads = gradient(
                first + t,
                Arguments(given.theta, state_before(t), accumulators, [x[t] for x in given.inputs]),
                captures.cell,
                extras,
                d_state,
                [x[t] for x in results.acc_extras],
            )
            step_sums = _summed(grads, out_grads)
            totals = [_add(total, step_sums[i]) for total, i in zip(totals, summed, strict=True)]
            new_d_state = [
                tf.zeros_like(given.state[i])
                if grads.state[i] is None or not self.reads_state
                else tf.ensure_shape(grads.state[i], given.state[i].shape)
                for i in differentiable
            ]
            d_inputs = _write(input_rows, d_inputs, [grads.inputs[i] for i in with_row], t)
            return t - 1, new_d_state, totals, d_inputs

        zeros = [tf.zeros_like(sources[i], sum_dtype(sources[i].dtype)) for i in summed]
        _, d_state0, totals, d_inputs = tf.while_loop(
            lambda t, *_: t >= begin,
            body,
            (end - 1, results.state, zeros, [row.new() for row in input_rows]),
            parallel_iterations=_BACKWARD_STEPS_AT_ONCE,
        )
        stacked = [row.stack(handle) for row, handle in zip(input_rows, d_inputs, strict=True)]
        sums = [tf.cast(x, sources[i].dtype) for x, i in zip(totals, summed, strict=True)]
        like = [given.theta, captures.cell, captures.out]
        of_theta, of_cell, of_out = groups(_spread(sums, summed, len(sources)), like)
        return Gradients(
            of_theta,
            of_cell,
            of_out,
            _spread(d_state0, differentiable, len(given.state)),
            _spread(stacked, with_row, len(given.inputs)),
        )


def padding_bounds(inputs: Any, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first time step that is not padding for all examples, and the one after the last.

    Only inputs that are a dict with the key `padding` have padding.
    """
    padding = inputs.get("padding") if isinstance(inputs, Mapping) else None
    if padding is None:
        return tf.constant(0), size
    is_padding = padding if padding.dtype == tf.bool else tf.not_equal(padding, 0)
    valid = tf.reduce_any(tf.logical_not(is_padding), axis=tf.range(1, tf.rank(padding)))
    numbers = tf.range(size)
    end = tf.reduce_max(tf.concat([[0], tf.where(valid, numbers + 1, 0)], axis=0))
    begin = tf.reduce_min(tf.concat([[end], tf.where(valid, numbers, end)], axis=0))
    return begin, end


def extras_shapes(traced: TracedCell, like: Any) -> list[tf.Tensor | np.ndarray]:
    """Returns the shapes of the extras, as far as they are known before the first time step."""
    if tf.nest.flatten(like) and like is not None:
        return [tf.shape(x) for x in traced.extras.tensors(like)]
    return [
        np.array(
            -1 if spec.shape.rank is None else [-1 if n is None else n for n in spec.shape],
            np.int32,
        )
        for spec in traced.extras_specs
    ]


def sequence_length(inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the size of dim 0 as int32 scalar, as a constant if it is static."""
    known = next((size for x in inputs if (size := x.shape[0]) is not None), None)
    return tf.shape(inputs[0])[0] if known is None else tf.constant(known)


def _write(
    rows: list[Rows], handles: Sequence[tf.Tensor], values: Sequence[tf.Tensor], t: tf.Tensor
) -> list[tf.Tensor]:
    return [row.write(h, t, x) for row, h, x in zip(rows, handles, values, strict=True)]


def _read(rows: list[Rows], handles: Sequence[tf.Tensor], t: tf.Tensor) -> list[tf.Tensor]:
    return [row.read(handle, t) for row, handle in zip(rows, handles, strict=True)]


def _summed(grads: StepGradients, out_grads: CellOutGradients | None) -> list[Any]:
    """Returns the gradients that are summed over time."""
    return [*grads.theta, *grads.captures, *(out_grads.captures if out_grads else ())]


def _add(total: tf.Tensor, grad: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    if isinstance(grad, tf.IndexedSlices):
        rows = tf.cast(grad.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, grad.indices[:, None], rows)
    return tf.ensure_shape(total + tf.cast(grad, total.dtype), total.shape)


def _spread(
    values: Sequence[tf.Tensor], places: Sequence[int], size: int
) -> list[tf.Tensor | None]:
    """Returns a list with the values at their places and None elsewhere."""
    result: list[tf.Tensor | None] = [None] * size
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return result
