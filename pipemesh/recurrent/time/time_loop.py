"""The two loops over time of a recurrent net: forward, and backward in reverse."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient, first_only, without_colocation
from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.structure import is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.recurrent.options import sum_dtype
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.time.cell import (
    Arguments,
    CellOut,
    CellOutGradients,
    StepGradients,
    TracedCell,
    TracedFunction,
    cell_out_gradient,
    groups,
    step_gradient,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Tensors with one row per time step, written row by row, as one loop variable each.

    Unlike in a `tf.TensorArray`, the shape of a row may be unknown until the step runs. If no row
    was written, the result is still a tensor of zeros.
    """

    shapes: Sequence[tf.Tensor | np.ndarray]  # of rows, int32; -1 for a size unknown before
    specs: Sequence[tf.TensorSpec]  # of rows
    size: tf.Tensor

    @classmethod
    def like(cls, rows: Sequence[tf.Tensor], size: tf.Tensor) -> Rows:
        """Returns rows of the shapes and dtypes of tensors."""
        return cls([tf.shape(row) for row in rows], specs_of(rows), size)

    def new(self) -> list[tf.Tensor]:
        """Returns handles of rows of zeros."""
        return [
            tf.raw_ops.TensorListReserve(
                element_shape=shape, num_elements=self.size, element_dtype=spec.dtype
            )
            for shape, spec in zip(self.shapes, self.specs, strict=True)
        ]

    def write(
        self, handles: Sequence[tf.Tensor], number: tf.Tensor, rows: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns handles of the tensors with one row of each replaced."""
        return [
            tf.raw_ops.TensorListSetItem(input_handle=handle, index=number, item=row)
            for handle, row in zip(handles, rows, strict=True)
        ]

    def read(self, handles: Sequence[tf.Tensor], number: tf.Tensor) -> list[tf.Tensor]:
        """Returns one row of each tensor."""
        rows = [
            tf.raw_ops.TensorListGetItem(
                input_handle=handle, index=number, element_shape=shape, element_dtype=spec.dtype
            )
            for handle, shape, spec in zip(handles, self.shapes, self.specs, strict=True)
        ]
        return [tf.ensure_shape(row, s.shape) for row, s in zip(rows, self.specs, strict=True)]

    def stack(self, handles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors; unwritten rows are zeros."""
        size = tf.TensorShape([tf.get_static_value(self.size)])
        stacked = [
            tf.raw_ops.TensorListStack(
                input_handle=handle, element_shape=shape, element_dtype=spec.dtype
            )
            for handle, shape, spec in zip(handles, self.shapes, self.specs, strict=True)
        ]
        return [
            tf.ensure_shape(tensor, size.concatenate(spec.shape))
            for tensor, spec in zip(stacked, self.specs, strict=True)
        ]


# The recomputation of earlier time steps does not wait for the gradient. Without this limit many
# time steps would run at once, each with all of its activations.
_BACKWARD_STEPS_AT_ONCE = 2


class Span(NamedTuple):
    """The time steps of the inputs to compute; the inputs may be a part of a sequence."""

    first: tf.Tensor  # the time of the inputs' first time step in the whole sequence
    begin: tf.Tensor  # an index of the inputs
    end: tf.Tensor  # after the last time step to compute


class Captures(NamedTuple):
    """Values of the outside tensors that a loop uses, by the function that uses them."""

    cell: Sequence[tf.Tensor]
    out: Sequence[tf.Tensor]
    stop: Sequence[tf.Tensor]


class Results(NamedTuple):
    """The results of a loop, or their gradients, as flat lists; `acc_` means over time."""

    acc_state: list[tf.Tensor]  # empty if `acc_out` replaces them
    acc_out: list[tf.Tensor]
    state: list[tf.Tensor]
    accumulators: list[tf.Tensor]  # without gradient
    acc_extras: list[tf.Tensor]  # empty unless requested


class Kept(NamedTuple):
    """Values that the backward loop needs."""

    acc_state: list[tf.Tensor]
    extras: list[tf.Tensor]  # handles of `Rows`
    accumulators: list[tf.Tensor]  # handles; their values before each time step
    span: Span  # that was computed


@dataclasses.dataclass
class TimeLoop:
    """A loop of a cell over time."""

    cell: TracedCell
    stop: TracedFunction | None = None
    return_extras: bool = False
    out: CellOut | None = None  # a function of each time step's state
    reads_state: bool = True  # if False, the backward pass does not need the states

    def __post_init__(self) -> None:
        self._extras_shapes = _extras_shapes(self.cell)

    @property
    def captures(self) -> Captures:
        """The outside tensors that it uses."""
        return Captures(
            self.cell.captures,
            self.out.captures if self.out else [],
            self.stop.captures if self.stop else [],
        )

    def forward(self, arguments: Arguments, captures: Captures, span: Span) -> tuple[Results, Kept]:
        """Computes the time steps of a span until the stop condition; time is dim 0 of inputs."""
        size = sequence_length(arguments.inputs)
        keeps_extras = self.return_extras or self.cell.cell.gradient is not None
        out_specs = self.out.specs if self.out else []
        rows = [
            Rows.like(arguments.state, size),
            Rows.like(arguments.accumulators, size),
            self._extras_rows(size) if keeps_extras else Rows([], [], size),
            Rows([np.array(spec.shape.as_list(), np.int32) for spec in out_specs], out_specs, size),
        ]

        def proceed(t: tf.Tensor, state: list[tf.Tensor], *_: object) -> tf.Tensor:
            if self.stop is None:
                return t < span.end
            stop = self.stop(span.first + t, arguments.theta, state, captures=captures.stop)
            return tf.logical_and(t < span.end, tf.logical_not(stop))

        def body(
            t: tf.Tensor,
            state: list[tf.Tensor],
            accumulators: list[tf.Tensor],
            acc: list[list[tf.Tensor]],
        ) -> Any:
            inputs = [x[t] for x in arguments.inputs]
            step_arguments = Arguments(arguments.theta, state, accumulators, inputs)
            step = self.cell(span.first + t, step_arguments, captures=captures.cell)
            out = []
            if self.out:
                out = self.out(span.first + t, step.state, captures=captures.out)
            # Accumulators are stored as the cell finds them; the next time step finds the new ones.
            kept = [step.state, accumulators, step.extras if keeps_extras else [], out]
            acc = [row.write(old, t, new) for row, old, new in zip(rows, acc, kept, strict=True)]
            return t + 1, step.state, step.accumulators, acc

        new = [row.new() for row in rows]
        end, state, accumulators, acc = tf.while_loop(
            proceed, body, (span.begin, arguments.state, arguments.accumulators, new)
        )
        acc_state = rows[0].stack(acc[0])
        results = Results(
            [] if self.out else acc_state,
            rows[3].stack(acc[3]),
            state,
            accumulators,
            rows[2].stack(acc[2]) if self.return_extras else [],
        )
        return results, Kept(acc_state, acc[2], acc[1], span._replace(end=end))

    def _extras_rows(self, size: tf.Tensor) -> Rows:
        """Returns storage for the extras over time."""
        return Rows(self._extras_shapes, self.cell.extras_specs, size)

    def backward(
        self, arguments: Arguments, captures: Captures, kept: Kept, d_results: Results
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of all tensors of `arguments` and `captures`, some of them None."""
        # `d_results` are those of the differentiable results.
        d_acc_extras = [] if self.cell.cell.gradient else d_results.acc_extras
        gradient = step_gradient(self.cell, with_extras=bool(d_acc_extras))
        out_gradient, out_symbolic, out_reads_state = None, None, False
        if self.out:
            out_gradient = cell_out_gradient(self.out)
            out_symbolic = out_gradient.results
            # The time is the first argument, the state comes next.
            used = out_gradient.used_arguments()
            out_reads_state = any(1 <= n <= len(arguments.state) for n in used)
        keep_alive((gradient, out_gradient))
        size = sequence_length(arguments.inputs)
        first, begin, end = kept.span
        accumulator_rows = Rows.like(arguments.accumulators, size)
        extras_rows = self._extras_rows(size)
        differentiable = [i for i, x in enumerate(arguments.state) if is_differentiable(x)]
        sources = [*arguments.theta, *captures.cell, *captures.out]
        symbolic = _summed(gradient.results, out_symbolic)
        summed = [i for i, grad in enumerate(symbolic) if grad is not None]
        with_row = [i for i, grad in enumerate(gradient.results.inputs) if grad is not None]
        inputs = [arguments.inputs[i] for i in with_row]
        specs = [tf.TensorSpec(x.shape[1:], x.dtype) for x in inputs]
        input_rows = Rows([tf.shape(x)[1:] for x in inputs], specs, size)

        def state_before(t: tf.Tensor) -> list[tf.Tensor]:
            if not self.reads_state:
                return arguments.state
            before = tf.maximum(t - 1, 0)
            return [
                tf.ensure_shape(tf.where(t > begin, x[before], x0), x0.shape)
                for x, x0 in zip(kept.acc_state, arguments.state, strict=True)
            ]

        def body(t: tf.Tensor, d_state: Any, totals: Any, d_inputs: Any) -> Any:
            accumulators = accumulator_rows.read(kept.accumulators, t)
            extras = extras_rows.read(kept.extras, t) if self.cell.cell.gradient else []
            if d_results.acc_state:
                d_state = [d + x[t] for d, x in zip(d_state, d_results.acc_state, strict=True)]
            out_grads = None
            if out_gradient:
                # If the cell does not read its state, the states over time need not be kept.
                state1 = [x[t] for x in kept.acc_state] if out_reads_state else arguments.state
                d_out = [x[t] for x in d_results.acc_out]
                out_grads = out_gradient(first + t, state1, captures.out, d_out)
                added = [out_grads.state[i] for i in differentiable]
                d_state = [d if x is None else d + x for d, x in zip(d_state, added, strict=True)]
            inputs = [x[t] for x in arguments.inputs]
            grads = gradient(
                first + t,
                Arguments(arguments.theta, state_before(t), accumulators, inputs),
                captures.cell,
                extras,
                d_state,
                [x[t] for x in d_acc_extras],
            )
            step_sums = _summed(grads, out_grads)
            totals = [_add(total, step_sums[i]) for total, i in zip(totals, summed, strict=True)]
            new_d_state = [
                tf.zeros_like(arguments.state[i])
                if grads.state[i] is None or not self.reads_state
                else tf.ensure_shape(grads.state[i], arguments.state[i].shape)
                for i in differentiable
            ]
            d_inputs = input_rows.write(d_inputs, t, [grads.inputs[i] for i in with_row])
            return t - 1, new_d_state, totals, d_inputs

        zeros = [tf.zeros_like(sources[i], sum_dtype(sources[i].dtype)) for i in summed]
        _, d_state0, totals, d_inputs = tf.while_loop(
            lambda t, *_: t >= begin,
            body,
            (end - 1, d_results.state, zeros, input_rows.new()),
            parallel_iterations=_BACKWARD_STEPS_AT_ONCE,
        )
        sums = [tf.cast(x, sources[i].dtype) for x, i in zip(totals, summed, strict=True)]
        like = [arguments.theta, captures.cell, captures.out]
        of_theta, of_cell, of_out = groups(_spread(sums, summed, len(sources)), like)
        return [
            *of_theta,
            *_spread(d_state0, differentiable, len(arguments.state)),
            *(None for _ in arguments.accumulators),
            *_spread(input_rows.stack(d_inputs), with_row, len(arguments.inputs)),
            *of_cell,
            *of_out,
            *(None for _ in captures.stop),
        ]


def padding_bounds(inputs: Any, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the first time step that is not padding for all, and the one after the last."""
    padding = inputs.get("padding") if isinstance(inputs, Mapping) else None
    if padding is None:
        return tf.constant(0), size
    is_padding = padding if padding.dtype == tf.bool else tf.not_equal(padding, 0)
    valid = tf.reduce_any(tf.logical_not(is_padding), axis=tf.range(1, tf.rank(padding)))
    numbers = tf.range(size)
    end = tf.reduce_max(tf.concat([[0], tf.where(valid, numbers + 1, 0)], axis=0))
    begin = tf.reduce_min(tf.concat([[end], tf.where(valid, numbers, end)], axis=0))
    return begin, end


def _extras_shapes(traced: TracedCell) -> list[tf.Tensor | np.ndarray]:
    """Returns the shapes of the extras (int32), with -1 for a size that the first step tells."""
    like = traced.cell.extras_like
    if like is not None and tf.nest.flatten(like):
        return [tf.shape(x) for x in traced.extras.tensors(like)]
    return [
        np.array(
            -1 if spec.shape.rank is None else [-1 if n is None else n for n in spec.shape],
            np.int32,
        )
        for spec in traced.extras_specs
    ]


def check_lengths(inputs: Sequence[tf.Tensor], names: Sequence[str]) -> None:
    """Checks that there are inputs and that they do not differ in dim 0, as far as it is known."""
    if not inputs:
        raise PipelineError("the inputs have no tensor in them; dim 0 of the inputs is time")
    for x, name in zip(inputs, names, strict=True):
        if x.shape.rank is None or x.shape.rank == 0:
            raise PipelineError(f"{name} has shape {x.shape}; it needs a dim 0, which is time")
    lengths = {name: x.shape[0] for x, name in zip(inputs, names, strict=True)}
    known = {name: length for name, length in lengths.items() if length is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in known.items())
        raise PipelineError(f"the inputs differ in dim 0, which is time: {listed}")


def sequence_length(inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the size of dim 0 as int32 scalar, as a constant if it is static."""
    known = next((size for x in inputs if (size := x.shape[0]) is not None), None)
    return tf.shape(inputs[0])[0] if known is None else tf.constant(known)


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


def run_loop(loop: TimeLoop, arguments: Arguments, captures: Captures, span: Span) -> Results:
    """Runs the loop forward, and backward when a gradient is requested."""
    loop_inputs = [*arguments, *captures]
    device = loop.cell.cell.device
    sizes: list[int] = []

    @custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        # Else a tape would record the loop, and keep all intermediate tensors of each time step.
        parts = list(groups((tf.stop_gradient(x) for x in tensors), loop_inputs))
        values = Arguments(*parts[: len(arguments)])
        captured = Captures(*parts[len(arguments) :])
        with tf.device(device):
            results, kept = loop.forward(values, captured, span)
        sizes[:] = [len(part) for part in results]

        def grad(*d_results: tf.Tensor) -> list[Any]:
            with without_colocation(), tf.device(device):
                parts = map(_differentiable, groups(d_results, results), results)
                grads = loop.backward(values, captured, kept, Results(*parts))
            # They depend on the states over time, which are constants here.
            known = {i: grad for i, grad in enumerate(grads) if grad is not None}
            given = [x for x in (*d_results, *tensors) if isinstance(x, tf.Tensor)]
            sources = [x for x in given if is_differentiable(x)]
            instead = "loop over time by tf.while_loop"
            if not known:
                return grads
            found = first_only([*known.values()], sources, "Recurrent", instead)
            return _spread(found, [*known], len(grads))

        return [x for part in results for x in part], grad

    flat = run(*(x for part in loop_inputs for x in part))
    results = Results(*groups(flat, [range(size) for size in sizes]))
    if loop.cell.cell.gradient:
        why = "a cell_grad takes no gradient of the extras that Recurrent returns"
        # A gradient through them raises a LookupError with this message.
        extras = [tf.raw_ops.PreventGradient(input=x, message=why) for x in results.acc_extras]
        results = results._replace(acc_extras=extras)
    return results


def _differentiable(gradients: Sequence[tf.Tensor], of: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of differentiable tensors, on the current device.

    A loop that uses tensors of another device runs on both devices, and they wait for each other.
    """
    return [tf.identity(g) for g, x in zip(gradients, of, strict=True) if is_differentiable(x)]
