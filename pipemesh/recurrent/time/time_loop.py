"""The two loops over time of a recurrent net: forward, and backward in reverse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient, without_colocation
from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.structure import Gradient, Structure, is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.randomness import loop_scope
from pipemesh.recurrent.options import sum_dtype
from pipemesh.recurrent.time.cell import (
    Arguments,
    StepGradient,
    StepGradients,
    StopCondition,
    TracedCell,
    TracedFunction,
    groups,
)


class Rows:
    """Storage that a loop writes row by row, as one loop variable each.

    Unlike in a `tf.TensorArray`, the shape of a row may be unknown until the step runs. If no row
    was written, the result is still a tensor of zeros.

    Args:
        row_shape: int32 vector; -1 for a size that is unknown before the first row is written.
        static_shape: the static shape of a row.
        dtype: the dtype.
        size: int32 scalar, the number of rows.
    """

    def __init__(
        self,
        row_shape: tf.Tensor | np.ndarray,
        static_shape: tf.TensorShape,
        dtype: tf.DType,
        size: tf.Tensor,
    ) -> None:
        self._row_shape = row_shape
        self._static_shape = static_shape
        self._dtype = dtype
        self._size = size

    @classmethod
    def like(cls, row: tf.Tensor, size: tf.Tensor) -> Rows:
        """Returns rows of the shape and dtype of a tensor."""
        return cls(tf.shape(row), row.shape, row.dtype, size)

    def new(self) -> tf.Tensor:
        """Returns a handle of rows of zeros."""
        return tf.raw_ops.TensorListReserve(
            element_shape=self._row_shape, num_elements=self._size, element_dtype=self._dtype
        )

    def write(self, handle: tf.Tensor, number: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
        """Returns the handle of the rows with one row replaced."""
        return tf.raw_ops.TensorListSetItem(input_handle=handle, index=number, item=row)

    def read(self, handle: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Returns one row."""
        row = tf.raw_ops.TensorListGetItem(
            input_handle=handle,
            index=number,
            element_shape=self._row_shape,
            element_dtype=self._dtype,
        )
        return tf.ensure_shape(row, self._static_shape)

    def stack(self, handle: tf.Tensor) -> tf.Tensor:
        """Returns all rows as one tensor; unwritten rows are zeros."""
        stacked = tf.raw_ops.TensorListStack(
            input_handle=handle, element_shape=self._row_shape, element_dtype=self._dtype
        )
        size = tf.get_static_value(self._size)
        return tf.ensure_shape(stacked, tf.TensorShape([size]).concatenate(self._static_shape))


_TIME = tf.TensorSpec([], tf.int32)


class CellOutGradients(NamedTuple):
    """Gradients of the inputs of the function, flat; None where there is none."""

    state: list[tf.Tensor | None]
    captures: list[Gradient]


class CellOut:
    """A function of the state of one time step, called once, with symbolic tensors.

    Args:
        name: names it in errors.
        forward: takes the state, returns nested tensors.
        gradient: takes the gradient of these, returns the gradient of the state; or None.
        state: structure of the state.
        specs: shapes and dtypes of the state's tensors.
        device: its device.

    Attributes:
        name: as given.
        gradient: as given.
        state: as given.
        state_specs: as given.
        device: as given.
        structure: of its results.
        specs: shapes and dtypes of its results.
        captures: the outside tensors that it uses.

    Raises:
        PipelineError: it has side effects, reads variables, returns no tensor or one without a
            static shape, or captures tensors although it has a user-defined gradient.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[[Any], Any],
        gradient: Callable[[Any], Any] | None,
        state: Structure,
        specs: Sequence[tf.TensorSpec],
        device: str,
    ) -> None:
        self.name, self.gradient, self.device = name, gradient, device
        self.state, self.state_specs = state, specs
        self.structure = Structure((), name)
        keyed_by: list[tf.Tensor] = []

        def run(t: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(device), loop_scope(tf.cast(t, tf.int64)) as outside:
                keyed_by[:] = outside
                outputs = forward(state.pack(flat))
                self.structure = Structure(outputs, f"what {name} returned")
                # An output that is an input gets its own name.
                return [tf.identity(x) for x in self.structure.tensors(outputs)]

        self._function = TracedFunction(run, [_TIME, *specs], name)
        self._function.check_pure(name)
        self.captures = self._function.captures
        self.specs = [tf.TensorSpec(x.shape, x.dtype) for x in self._function.results]
        if not self.specs:
            raise PipelineError(f"{name} returned no tensor; the layer above needs inputs")
        for spec, leaf in zip(self.specs, self.structure.leaf_names, strict=True):
            if not spec.shape.is_fully_defined():
                raise PipelineError(
                    f"{leaf} has shape {spec.shape}; layers need inputs of static shapes: set it "
                    "with tf.ensure_shape"
                )
        captured = [x for x in self.captures if not any(x is key for key in keyed_by)]
        if gradient is not None and captured:
            names = ", ".join(self._function.name_of(x) for x in captured)
            raise PipelineError(
                f"{name} uses tensors that it was not given: {names}; they would get no gradient, "
                "since the gradient is given by hand; leave it out or put them in the state"
            )

    def __call__(
        self, t: tf.Tensor, state: Sequence[tf.Tensor], captures: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Computes the function for time `t` (int32 scalar)."""
        return self._function(t, *state, captures=captures)

    def rows(self, size: tf.Tensor) -> list[Rows]:
        """Returns storage for its results over time."""
        return [
            Rows(np.array(spec.shape.as_list(), np.int32), spec.shape, spec.dtype, size)
            for spec in self.specs
        ]


class CellOutGradient:
    """The gradient of a `CellOut`, for one time step.

    Args:
        out: the function.

    Attributes:
        found: symbolic gradients, None where there is none.
        reads_state: True if it reads the state.

    Raises:
        PipelineError: the user's gradient returns an invalid structure or has side effects.
    """

    def __init__(self, out: CellOut) -> None:
        captures = [tf.TensorSpec(x.shape, x.dtype) for x in out.captures]
        d_specs = [spec for spec in out.specs if is_differentiable(spec)]
        num_state, num_captures = len(out.state_specs), len(captures)

        def run(t: tf.Tensor, *flat: tf.Tensor) -> CellOutGradients:
            state, rest = flat[:num_state], flat[num_state:]
            captured, d_outputs = rest[:num_captures], rest[num_captures:]
            with tf.device(out.device), loop_scope(tf.cast(t, tf.int64)):
                if out.gradient is not None:
                    return CellOutGradients(_by_user(out, d_outputs), [None] * num_captures)
                ys = [y for y in out(t, state, captured) if is_differentiable(y)]
                sources = [*state, *captured]
                grads = _derived(ys, sources, d_outputs)
                of_state = [
                    None if g is None else tf.convert_to_tensor(g) for g in grads[:num_state]
                ]
                return CellOutGradients(of_state, grads[num_state:])

        what = f"the gradient of {out.name}"
        self._function = TracedFunction(run, [_TIME, *out.state_specs, *captures, *d_specs], what)
        self._function.check_pure(what)
        self.found: CellOutGradients = self._function.results
        self.reads_state = any(n <= num_state for n in self._function.used_arguments() if n > 0)

    def __call__(
        self,
        t: tf.Tensor,
        state: Sequence[tf.Tensor],
        captures: Sequence[tf.Tensor],
        d_outputs: Sequence[tf.Tensor],
    ) -> CellOutGradients:
        """Computes the gradients for time `t` (int32 scalar).

        `d_outputs` are the gradients of the differentiable outputs.
        """
        return self._function(t, *state, *captures, *d_outputs)


def _derived(
    ys: list[tf.Tensor], sources: Sequence[tf.Tensor], d_ys: Sequence[tf.Tensor]
) -> list[Gradient]:
    xs = [x for x in sources if is_differentiable(x)]
    grads = iter(tf.gradients(ys, xs, list(d_ys)) if ys and xs else [None] * len(xs))
    return [next(grads) if is_differentiable(x) else None for x in sources]


def _by_user(out: CellOut, d_outputs: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    assert out.gradient is not None
    given = iter(d_outputs)
    full = [
        next(given) if is_differentiable(spec) else tf.zeros(spec.shape, spec.dtype)
        for spec in out.specs
    ]
    returned = out.gradient(out.structure.pack(full))
    what = f"what the gradient of {out.name} returned"
    grads = out.state.gradients(out.state_specs, returned, what)
    return [None if g is None else tf.convert_to_tensor(g) for g in grads]


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


class Results(NamedTuple):
    """The results of a loop, as flat lists.

    Attributes:
        acc_state: the states over time; empty if `acc_out` replaces them.
        acc_out: the results of the loop's `out` over time.
        state: the final state.
        accumulators: their final values, without gradient.
        acc_extras: the extras over time, if requested.
    """

    acc_state: list[tf.Tensor]
    acc_out: list[tf.Tensor]
    state: list[tf.Tensor]
    accumulators: list[tf.Tensor]
    acc_extras: list[tf.Tensor]


def run_loop(loop: TimeLoop, given: Arguments, captures: Captures, span: Span) -> Results:
    """Runs the loop forward, and backward when a gradient is requested.

    Args:
        loop: the loop.
        given: flat lists of tensors; the inputs over time, in dim 0.
        captures: values of the outside tensors that the loop uses.
        span: the time steps to compute.
    """
    arguments = [*given, *captures]
    device = loop.cell.cell.device
    sizes: list[int] = []

    @custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        # Else a tape would record the loop, and keep all intermediate tensors of each time step.
        parts = list(groups((tf.stop_gradient(x) for x in tensors), arguments))
        values, captured = Arguments(*parts[: len(given)]), Captures(*parts[len(given) :])
        with tf.device(device):
            forward = loop.forward(values, captured, span)
            over_time = loop.stacked_extras(values, forward)
        acc_state = [] if loop.out else forward.acc_state
        results = Results(
            acc_state, forward.acc_out, forward.state, forward.accumulators, over_time
        )
        sizes[:] = [len(part) for part in results]

        def grad(*d_results: tf.Tensor) -> list[Any]:
            with without_colocation(), tf.device(device):
                given_grads = Results(*groups(d_results, results))
                differentiable = Results(*map(_differentiable, given_grads, results))
                grads = loop.backward(
                    values,
                    captured,
                    forward,
                    ResultGradients(
                        differentiable.acc_state,
                        differentiable.acc_out,
                        differentiable.state,
                        [] if loop.cell.cell.gradient else differentiable.acc_extras,
                    ),
                )
                flat = [
                    *(*grads.theta, *grads.state, *(None for _ in given.accumulators)),
                    *(*grads.inputs, *grads.captures, *grads.out_captures),
                    *(None for _ in captures.stop),
                ]
                # It depends on the states over time, which are constants here.
                why = "Recurrent has no gradient of its gradient"
                return [None if g is None else _without_gradient(g, why) for g in flat]

        return [x for part in results for x in part], grad

    flat = run(*(x for part in arguments for x in part))
    results = Results(*groups(flat, [range(size) for size in sizes]))
    if loop.cell.cell.gradient:
        why = "a cell_grad takes no gradient of the extras that Recurrent returns"
        results = results._replace(
            acc_extras=[_without_gradient(x, why) for x in results.acc_extras]
        )
    return results


def _without_gradient(tensor: tf.Tensor, why: str) -> tf.Tensor:
    """Returns the tensor; a gradient through it raises a LookupError with this message."""
    return tf.raw_ops.PreventGradient(input=tensor, message=why)


def _differentiable(gradients: Sequence[tf.Tensor], of: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of differentiable tensors, on the current device.

    A loop that uses tensors of another device runs on both devices, and they wait for each other.
    """
    return [tf.identity(g) for g, x in zip(gradients, of, strict=True) if is_differentiable(x)]
