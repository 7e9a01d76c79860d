"""A recurrent cell that is traced once; its gradient is derived from the same graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from pipemesh.backend.graphs import drop_unused_captures, reads_replaced
from pipemesh.backend.operation_kinds import REF_VARIABLES, check_pure
from pipemesh.backend.structure import Gradient, Structure, is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.randomness import loop_scope
from pipemesh.recurrent.passes.captures import name_of


class OutsideReads:
    """A reader of variables in the scope where it is created, for a function traced inside."""

    def __init__(self) -> None:
        # A graph, or None in eager mode.
        self._place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # The handle is kept so that its id is not reused.
        self._values: dict[int, tuple[Any, tf.Tensor]] = {}

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Replaces reads of outside variables, in the graph being traced, by their values.

        Only in the graph itself: a branch or a loop inside it has its own graph.
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
        """Reads the variable of a captured value in the scope where this object was created.

        Returns:
            The variable's handle and its value; None if the captured value is not from a variable.
        """
        found = (handle for handle, value in self._values.values() if value is captured)
        handle = next(found, None)
        if handle is None or self._place is not None:
            return None if handle is None else (handle, captured)
        # An eager tape does not record operations in an `init_scope`.
        return handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=captured.dtype)


class TracedFunction:
    """A function of flat tensors, called once with symbolic ones.

    Args:
        run: takes tensors and returns nested tensors, None, or IndexedSlices.
        specs: shapes and dtypes of its arguments.
        what: names it in errors.

    Attributes:
        captures: the outside tensors that it uses; for a variable, its value.
        results: its results, as symbolic tensors.

    Raises:
        PipelineError: a branch or a loop in it reads variables, or it writes them, or it uses other
            resources.
    """

    def __init__(self, run: Callable[..., Any], specs: Sequence[tf.TensorSpec], what: str) -> None:
        reads = OutsideReads()

        def run_with_reads(*arguments: tf.Tensor) -> Any:
            with reads.instead():
                return run(*arguments)

        function = tf.function(run_with_reads, autograph=False)
        self._function = function.get_concrete_function(*specs)
        graph = self._function.graph
        names = {id(v.handle): v.name for v in graph.variables}
        self._variables: dict[int, str] = {}
        self.captures: list[tf.Tensor] = []
        for tensor in self._function.captured_inputs:
            if tensor.dtype == tf.resource:
                # If the function writes it, this check reports that.
                self.check_pure(what)
                raise PipelineError(
                    f"{what} reads the variable or resource {name_of(tensor, names)!r} in a branch "
                    "or a loop; read it before that"
                )
            value = tensor
            if (found := reads.read(tensor)) is not None:
                handle, value = found
                self._variables[id(value)] = name_of(handle, names)
            elif _is_ref_variable(tensor):
                # A TF1 variable that is not a resource.
                value = tf.identity(tensor)
                self._variables[id(value)] = tensor.name
            self.captures.append(value)
        self._function.set_external_captures(self.captures)
        # Else callers would assume that the function still reads these variables.
        graph.variables = ()
        self.results: Any = graph.structured_outputs

    def check_pure(self, what: str) -> None:
        """Raises if it has side effects or state, so that it must not be computed twice."""
        check_pure(
            self._function.graph.as_graph_def(),
            what,
            "the backward pass computes the cell again and must find the same",
            effects=False,
        )

    def used_arguments(self) -> set[int]:
        """Returns the indices of the arguments that any result depends on."""
        results = tf.nest.flatten(self.results, expand_composites=True)
        return self._arguments_of(x.op for x in results if x is not None)

    def draws(self) -> Iterator[set[int]]:
        """Returns for each random draw the indices of the arguments that it depends on.

        Captures count as arguments, after the others.
        """
        for operation in self._function.graph.get_operations():
            if operation.type.startswith("StatelessRandom"):
                yield self._arguments_of([operation])

    def _arguments_of(self, operations: Iterable[tf.Operation]) -> set[int]:
        arguments = {x.op: number for number, x in enumerate(self._function.graph.inputs)}
        todo = list(operations)
        seen = set(todo)
        while todo:
            operation = todo.pop()
            sources = {*(x.op for x in operation.inputs), *operation.control_inputs} - seen
            seen |= sources
            todo.extend(sources)
        return {number for operation, number in arguments.items() if operation in seen}

    def is_variable(self, capture: tf.Tensor) -> bool:
        """Returns True if one of `captures` is the value of a variable."""
        return id(capture) in self._variables

    def name_of(self, capture: tf.Tensor) -> str:
        """Returns a name for one of `captures`; eager tensors have no name."""
        return name_of(capture, self._variables)

    def __call__(self, *arguments: tf.Tensor, captures: Sequence[tf.Tensor] | None = None) -> Any:
        """Calls the function, with other values for `captures` if given."""
        if captures is None:
            return self._function(*arguments)
        self._function.set_external_captures(list(captures))
        try:
            return self._function(*arguments)
        finally:
            self._function.set_external_captures(self.captures)


def _is_ref_variable(tensor: tf.Tensor) -> bool:
    return getattr(getattr(tensor, "op", None), "type", None) in REF_VARIABLES


T = TypeVar("T")
_TIME = tf.TensorSpec([], tf.int32)


class Arguments(NamedTuple):
    """The arguments of a cell, as flat lists."""

    theta: list[tf.Tensor]
    state: list[tf.Tensor]
    accumulators: list[tf.Tensor]
    inputs: list[tf.Tensor]


class ArgumentSpecs(NamedTuple):
    """Shapes and dtypes of the arguments."""

    theta: list[tf.TensorSpec]
    state: list[tf.TensorSpec]
    accumulators: list[tf.TensorSpec]
    inputs: list[tf.TensorSpec]


class Structures(NamedTuple):
    """Nesting of the arguments."""

    theta: Structure
    state: Structure
    accumulators: Structure
    inputs: Structure


@dataclasses.dataclass(frozen=True)
class Cell:
    """The user's functions and settings of a cell.

    Attributes:
        name: names the cell in errors.
        forward: `(theta, state0, inputs) -> (state1, extras)`.
        gradient: `(theta, state0, inputs, extras, dstate1) -> (dtheta, dstate0, dinputs)`, or None.
        accumulator_layer: has GetAccumulatorValues and SetAccumulatorValues; or None.
        extras_like: an example of the extras, or None.
        may_capture: True if it may use outside tensors.
        device: its device.
    """

    name: str
    forward: Callable[[Any, Any, Any], tuple[Any, Any]]
    gradient: Callable[..., Sequence[Any]] | None
    accumulator_layer: Any
    extras_like: Any
    may_capture: Callable[[tf.Tensor], bool]
    device: str


class Step(NamedTuple):
    """The results of a cell at one time step, as flat lists."""

    state: list[tf.Tensor]
    accumulators: list[tf.Tensor]
    extras: list[tf.Tensor]


class StepGradients(NamedTuple):
    """Gradients of a cell's arguments at one time step, as flat lists; None where there is none."""

    theta: Sequence[Gradient]
    captures: Sequence[Gradient]
    state: Sequence[Any]
    inputs: Sequence[Any]


class TracedCell:
    """A cell function that was called once, with symbolic tensors.

    Args:
        cell: the functions.
        structures: of its arguments.
        specs: shapes and dtypes of its arguments.

    Attributes:
        cell: as given.
        structures: as given.
        specs: as given.
        extras: structure of the extras.
        extras_specs: their shapes and dtypes.
        captures: the outside tensors that it uses.

    Raises:
        PipelineError: the cell has side effects, uses a tensor that it may not use, or does not
            return a state like its input state.
    """

    def __init__(self, cell: Cell, structures: Structures, specs: ArgumentSpecs) -> None:
        self.cell, self.structures, self.specs = cell, structures, specs
        self.extras = Structure((), "extras")
        keyed_by: list[tf.Tensor] = []

        def run(t: tf.Tensor, *flat: tf.Tensor) -> Step:
            with tf.device(cell.device), loop_scope(tf.cast(t, tf.int64)) as outside:
                keyed_by[:] = outside
                step = self._call(Arguments(*groups(flat, specs)))
                # An output that is an input gets its own name.
                return Step(*([tf.identity(x) for x in part] for part in step))

        what = f"the cell {cell.name!r}"
        self._step = TracedFunction(run, [_TIME, *_flat(specs)], what)
        self._step.check_pure(what)
        extras = self._step.results.extras
        self.extras_specs = [tf.TensorSpec(x.shape, x.dtype) for x in extras]
        self.captures = self._step.captures
        self._check_captures(keyed_by)
        self._check_draws()

    def step(self, t: tf.Tensor, given: Arguments, captures: Sequence[tf.Tensor]) -> Step:
        """Computes time step `t` (int32 scalar), with values for `captures`."""
        return self._step(t, *_flat(given), captures=captures)

    def state_read(self) -> list[str]:
        """Returns the names of the state's tensors that a result of the cell depends on."""
        # The time is the first argument.
        begin = 1 + len(self.specs.theta)
        used = self._step.used_arguments()
        names = enumerate(self.structures.state.leaf_names, begin)
        return [name for number, name in names if number in used]

    def _call(self, given: Arguments) -> Step:
        """Calls the user's function and checks its results."""
        theta, state, accumulators, inputs = (
            structure.pack(part) for structure, part in zip(self.structures, given, strict=True)
        )
        layer = self.cell.accumulator_layer
        if layer is None:
            returned = self.cell.forward(theta, state, inputs)
        else:
            saved = layer.GetAccumulatorValues()
            layer.SetAccumulatorValues(accumulators)
            try:
                returned = self.cell.forward(theta, state, inputs)
                accumulators = layer.GetAccumulatorValues()
            finally:
                layer.SetAccumulatorValues(saved)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise PipelineError(
                f"the cell {self.cell.name!r} returned {type(returned).__name__}; it must return "
                "a pair (state1, extras), where extras may be ()"
            )
        state1, extras = returned
        return Step(
            self.structures.state.tensors_like(self.specs.state, state1, "state1"),
            self.structures.accumulators.tensors_like(
                self.specs.accumulators, accumulators, "the accumulators afterwards"
            ),
            self._flat_extras(() if extras is None else extras),
        )

    def _flat_extras(self, extras: Any) -> list[tf.Tensor]:
        self.extras = Structure(extras, "extras")
        tensors = self.extras.tensors(extras)
        like = self.cell.extras_like
        if like is None or not (tensors or tf.nest.flatten(like)):
            return tensors
        template = Structure(like, "the argument extras")
        return template.tensors_like(template.tensors(like), extras, "what the cell has as extras")

    def _check_captures(self, keyed_by: list[tf.Tensor]) -> None:
        refused = [x for x in self.captures if not self._is_allowed(x, keyed_by)]
        if not refused:
            return
        names = ", ".join(f"{self._step.name_of(x)} (shape {x.shape})" for x in refused)
        alternative = (
            "allow_implicit_capture is only for cells without a cell_grad"
            if self.cell.gradient
            else "or allow it with allow_implicit_capture or allowed_tensor_captures"
        )
        raise PipelineError(
            f"the cell {self.cell.name!r} uses tensors or variables that it was not given: "
            f"{names}; pass them in theta (or in the inputs, if they differ from step to step); "
            f"{alternative}"
        )

    def _is_allowed(self, tensor: tf.Tensor, keyed_by: list[tf.Tensor]) -> bool:
        if any(tensor is key for key in keyed_by):
            return True
        # Such as the global step, which has no gradient.
        if self._step.is_variable(tensor) and not is_differentiable(tensor):
            return True
        return self.cell.may_capture(tensor)

    def _check_draws(self) -> None:
        """Checks that no random draw keyed by a variable repeats at every time step."""
        count = 1 + len(_flat(self.specs))
        variables = {
            count + number: capture
            for number, capture in enumerate(self.captures)
            if self._step.is_variable(capture)
        }
        of_weights = range(1, 1 + len(self.specs.theta))
        for used in self._step.draws():
            keys = [self._step.name_of(variables[n]) for n in used if n in variables]
            if keys and not any(n < count and n not in of_weights for n in used):
                raise PipelineError(
                    f"the cell {self.cell.name!r} draws random numbers that depend on the variable "
                    f"{keys[0]!r}, but not on the time step: they would be the same at every step; "
                    "if it is the step that random numbers are keyed by, enter "
                    "pipemesh.randomness.plan_free_randomness(step) around Recurrent"
                )


class StepGradient:
    """The gradient of one time step, which recomputes the cell.

    Args:
        traced: the cell.
        with_extras: True if the extras have a gradient.

    Attributes:
        found: symbolic gradients, None where there is none.

    Raises:
        PipelineError: the user's gradient returns an invalid structure or has side effects.
    """

    def __init__(self, traced: TracedCell, with_extras: bool) -> None:
        self._traced = traced
        self._with_extras = with_extras
        specs, cell = traced.specs, traced.cell
        parts = [
            *specs,
            [tf.TensorSpec(x.shape, x.dtype) for x in traced.captures],
            traced.extras_specs if cell.gradient else [],
            [x for x in specs.state if is_differentiable(x)],
            [x for x in traced.extras_specs if with_extras and is_differentiable(x)],
        ]

        def run(t: tf.Tensor, *flat: tf.Tensor) -> StepGradients:
            *given, captures, extras, d_state, d_extras = groups(flat, parts)
            arguments = Arguments(*given)
            with tf.device(cell.device), loop_scope(tf.cast(t, tf.int64)):
                if cell.gradient:
                    grads = self._by_user(cell.gradient, arguments, extras, d_state)
                else:
                    grads = self._derived(t, arguments, captures, [*d_state, *d_extras])
                state, inputs = (
                    [None if g is None else tf.convert_to_tensor(g) for g in part]
                    for part in (grads.state, grads.inputs)
                )
                return StepGradients(grads.theta, grads.captures, state, inputs)

        what = f"the gradient of the cell {cell.name!r}"
        self._function = TracedFunction(run, [_TIME, *(x for part in parts for x in part)], what)
        self._function.check_pure(what)
        self.found: StepGradients = self._function.results

    def __call__(
        self,
        t: tf.Tensor,
        given: Arguments,
        captures: Sequence[tf.Tensor],
        extras: Sequence[tf.Tensor],
        d_state: Sequence[tf.Tensor],
        d_extras: Sequence[tf.Tensor],
    ) -> StepGradients:
        """Computes the gradients of one time step.

        Args:
            t: int32 scalar, the time.
            given: the arguments of the cell.
            captures: values of the captured tensors.
            extras: the cell's extras if the user provides the gradient; else empty.
            d_state: gradients of the differentiable state tensors.
            d_extras: gradients of the differentiable extras, if `with_extras`.
        """
        return self._function(t, *_flat(given), *captures, *extras, *d_state, *d_extras)

    def _derived(
        self, t: tf.Tensor, given: Arguments, captures: list[tf.Tensor], d_ys: list[tf.Tensor]
    ) -> StepGradients:
        outputs = self._traced.step(t, given, captures)
        candidates = [*outputs.state, *(outputs.extras if self._with_extras else [])]
        ys = [y for y in candidates if is_differentiable(y)]
        sources = [given.theta, captures, given.state, given.inputs]
        xs = [x for part in sources for x in part if is_differentiable(x)]
        grads = iter(tf.gradients(ys, xs, d_ys) if ys and xs else [None] * len(xs))
        return StepGradients(
            *([next(grads) if is_differentiable(x) else None for x in part] for part in sources)
        )

    def _by_user(
        self,
        gradient: Callable[..., Sequence[Any]],
        given: Arguments,
        extras: list[tf.Tensor],
        d_state: list[tf.Tensor],
    ) -> StepGradients:
        structures, specs, name = (
            self._traced.structures,
            self._traced.specs,
            self._traced.cell.name,
        )
        d_values = iter(d_state)
        d_state1 = [
            next(d_values) if is_differentiable(x) else tf.zeros_like(x) for x in given.state
        ]
        returned = gradient(
            structures.theta.pack(given.theta),
            structures.state.pack(given.state),
            structures.inputs.pack(given.inputs),
            self._traced.extras.pack(extras),
            structures.state.pack(d_state1),
        )
        if not isinstance(returned, (tuple, list)) or len(returned) not in (3, 4):
            raise PipelineError(
                f"the cell_grad of {name!r} must return (dtheta, dstate0, dinputs), or these and "
                "None"
            )
        if any(leaf is not None for leaf in tf.nest.flatten(returned[3:])):
            raise PipelineError(
                f"the cell_grad of {name!r} returned gradients of captured tensors, but a cell "
                "with a cell_grad cannot capture any; pass them in theta"
            )
        return StepGradients(
            structures.theta.gradients(specs.theta, returned[0], "dtheta"),
            [None for _ in self._traced.captures],
            structures.state.gradients(specs.state, returned[1], "dstate0"),
            structures.inputs.gradients(specs.inputs, returned[2], "dinputs"),
        )


def _flat(arguments: Iterable[Iterable[T]]) -> list[T]:
    return [leaf for part in arguments for leaf in part]


def groups(flat: Iterable[T], like: Iterable[Sequence[object]]) -> Iterator[list[T]]:
    """Splits a flat list into lists with the lengths of the given ones."""
    values = iter(flat)
    for part in like:
        yield [next(values) for _ in part]


class StopCondition:
    """A condition that is checked before each time step.

    Args:
        stop_fn: `(t, theta, state) -> bool tensor`; stops when all elements are true.
        structures: of the cell's arguments.
        specs: shapes and dtypes of the cell's arguments.

    Attributes:
        captures: the outside tensors that it uses.
    """

    def __init__(
        self,
        stop_fn: Callable[[tf.Tensor, Any, Any], Any],
        structures: Structures,
        specs: ArgumentSpecs,
    ) -> None:
        def run(t: tf.Tensor, *flat: tf.Tensor) -> tf.Tensor:
            theta = structures.theta.pack(flat[: len(specs.theta)])
            state = structures.state.pack(flat[len(specs.theta) :])
            stop = tf.convert_to_tensor(stop_fn(tf.cast(t, tf.int64), theta, state))
            if stop.dtype != tf.bool:
                raise PipelineError(f"stop_fn returned {stop.dtype.name}; it must return bool")
            return tf.reduce_all(stop)

        time = tf.TensorSpec([], tf.int32)
        self._function = TracedFunction(run, [time, *specs.theta, *specs.state], "stop_fn")
        self.captures = self._function.captures

    def __call__(
        self,
        t: tf.Tensor,
        theta: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        captures: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Returns True (a bool scalar) to stop before time `t` (int32 scalar)."""
        return self._function(t, *theta, *state, captures=captures)
