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
from pipemesh.randomness.scope import loop_scope
from pipemesh.recurrent.passes.captures import name_of
from pipemesh.recurrent.passes.tracing import specs_of


class OutsideReads:
    """A reader of variables in the scope where it is created, for a function traced inside.

    A variable may change between the passes of a loop, as the global step does. If the loop read
    it, the backward pass would use another value. Read once outside, it is a captured tensor.
    """

    def __init__(self) -> None:
        # A graph, or None in eager mode.
        self._place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # The handle is kept so that its id is not reused.
        self._values: dict[int, tuple[Any, tf.Tensor]] = {}

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Replaces reads of outside variables in the traced graph, in no branch or loop of it."""
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
        """Returns the handle and the value of the variable of a captured value, if it is of one."""
        for handle, value in self._values.values():
            if value is captured:
                if self._place is None:
                    # An eager tape does not record operations in an `init_scope`.
                    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=captured.dtype)
                return handle, value
        return None


class TracedFunction:
    """A function of nested tensors, called once with symbolic ones."""

    def __init__(self, run: Callable[..., Any], arguments: Sequence[Any], what: str) -> None:
        # `arguments`: nested specs of the arguments of `run`.
        # `run`: returns nested tensors, None, or IndexedSlices.
        # `what`: names it in errors.
        reads = OutsideReads()

        def run_with_reads(*flat: tf.Tensor) -> Any:
            with reads.instead():
                return run(*tf.nest.pack_sequence_as(arguments, flat))

        function = tf.function(run_with_reads, autograph=False)
        self._function = function.get_concrete_function(*tf.nest.flatten(arguments))
        graph = self._function.graph
        names = {id(v.handle): v.name for v in graph.variables}
        self._variables: dict[int, str] = {}
        # The outside tensors that it uses; for a variable, its value.
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
        """Returns for each random draw the arguments, by index, and captures that it depends on."""
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

    def __call__(self, *arguments: Any, captures: Sequence[tf.Tensor] | None = None) -> Any:
        """Calls the function, with other values for `captures` if given."""
        flat = tf.nest.flatten(arguments)
        if captures is None:
            return self._function(*flat)
        self._function.set_external_captures(list(captures))
        try:
            return self._function(*flat)
        finally:
            self._function.set_external_captures(self.captures)


def _is_ref_variable(tensor: tf.Tensor) -> bool:
    return getattr(getattr(tensor, "op", None), "type", None) in REF_VARIABLES


_TIME = tf.TensorSpec([], tf.int32)


class StepFunction(TracedFunction):
    """A pure function of a time step (int32 scalar) and other arguments.

    Random numbers inside depend on the time step.
    """

    def __init__(
        self, run: Callable[..., Any], arguments: Sequence[Any], what: str, device: str
    ) -> None:
        # Outside tensors that its random numbers depend on.
        self._keyed_by: list[tf.Tensor] = []

        def run_in_scope(t: tf.Tensor, *rest: Any) -> Any:
            with tf.device(device), loop_scope(tf.cast(t, tf.int64)) as self._keyed_by:
                return run(t, *rest)

        super().__init__(run_in_scope, [_TIME, *arguments], what)
        self.check_pure(what)

    def is_key(self, capture: tf.Tensor) -> bool:
        """Returns True if one of `captures` is used for random numbers alone."""
        return any(capture is key for key in self._keyed_by)


class Arguments(NamedTuple):
    """The arguments of a cell: of each the flat tensors, their specs, or their structure."""

    theta: Any
    state: Any
    accumulators: Any
    inputs: Any


@dataclasses.dataclass(frozen=True)
class Cell:
    """The user's functions and settings of a cell."""

    name: str
    # `(theta, state0, inputs) -> (state1, extras)`
    forward: Callable[[Any, Any, Any], tuple[Any, Any]]
    # `(theta, state0, inputs, extras, dstate1) -> (dtheta, dstate0, dinputs)`
    gradient: Callable[..., Sequence[Any]] | None
    accumulator_layer: Any  # has GetAccumulatorValues and SetAccumulatorValues; or None
    extras_like: Any  # an example, or None
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


class TracedCell(StepFunction):
    """A cell function that was called once; it takes the time step and flat `Arguments`."""

    def __init__(self, cell: Cell, structures: Arguments, specs: Arguments) -> None:
        self.cell, self.structures, self.specs = cell, structures, specs
        self.extras = Structure((), "extras")  # Structure of the extras, known after tracing.

        def run(t: tf.Tensor, arguments: Arguments) -> Step:
            del t
            # An output that is an input gets its own name.
            return Step(*([tf.identity(x) for x in part] for part in self._call(arguments)))

        super().__init__(run, [specs], f"the cell {cell.name!r}", cell.device)
        self.extras_specs = specs_of(self.results.extras)
        self._check_captures()
        self._check_draws()

    def state_read(self) -> list[str]:
        """Returns the names of the state's tensors that a result of the cell depends on."""
        # The time is the first argument.
        begin = 1 + len(self.specs.theta)
        used = self.used_arguments()
        names = enumerate(self.structures.state.leaf_names, begin)
        return [name for number, name in names if number in used]

    def _call(self, arguments: Arguments) -> Step:
        """Calls the user's function and checks its results."""
        theta, state, accumulators, inputs = (
            structure.pack(part) for structure, part in zip(self.structures, arguments, strict=True)
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

    def _check_captures(self) -> None:
        refused = [x for x in self.captures if not self._is_allowed(x)]
        if not refused:
            return
        names = ", ".join(f"{self.name_of(x)} (shape {x.shape})" for x in refused)
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

    def _is_allowed(self, tensor: tf.Tensor) -> bool:
        # A variable without a gradient is such as the global step.
        is_step = self.is_variable(tensor) and not is_differentiable(tensor)
        return self.is_key(tensor) or is_step or self.cell.may_capture(tensor)

    def _check_draws(self) -> None:
        """Checks that no random draw keyed by a variable repeats at every time step."""
        count = 1 + len(tf.nest.flatten(self.specs))
        variables = {
            count + number: capture
            for number, capture in enumerate(self.captures)
            if self.is_variable(capture)
        }
        of_weights = range(1, 1 + len(self.specs.theta))
        for used in self.draws():
            keys = [self.name_of(variables[n]) for n in used if n in variables]
            if keys and not any(n < count and n not in of_weights for n in used):
                raise PipelineError(
                    f"the cell {self.cell.name!r} draws random numbers that depend on the variable "
                    f"{keys[0]!r}, but not on the time step: they would be the same at every step; "
                    "if it is the step that random numbers are keyed by, enter "
                    "pipemesh.randomness.plan_free_randomness(step) around Recurrent"
                )


def step_gradient(traced: TracedCell, with_extras: bool) -> StepFunction:
    """Returns the gradient of one time step, which recomputes the cell.

    Its arguments are the time step, the cell's arguments, captures, the extras for a gradient by
    the user, and the gradients of the differentiable state and, if `with_extras`, extras.
    """
    specs, cell = traced.specs, traced.cell

    def run(
        t: tf.Tensor,
        arguments: Arguments,
        captures: list[tf.Tensor],
        extras: list[tf.Tensor],
        d_state: list[tf.Tensor],
        d_extras: list[tf.Tensor],
    ) -> StepGradients:
        if cell.gradient:
            theta, state, inputs = _by_user(traced, arguments, extras, d_state)
            of_captures: list[Gradient] = [None for _ in captures]
        else:
            step = traced(t, arguments, captures=captures)
            theta, of_captures, state, inputs = _derived(
                [*step.state, *(step.extras if with_extras else [])],
                [arguments.theta, captures, arguments.state, arguments.inputs],
                [*d_state, *d_extras],
            )
        return StepGradients(theta, of_captures, _dense(state), _dense(inputs))

    parts = [
        specs,
        specs_of(traced.captures),
        traced.extras_specs if cell.gradient else [],
        [x for x in specs.state if is_differentiable(x)],
        [x for x in traced.extras_specs if with_extras and is_differentiable(x)],
    ]
    return StepFunction(run, parts, f"the gradient of the cell {cell.name!r}", cell.device)


def _by_user(
    traced: TracedCell, arguments: Arguments, extras: list[tf.Tensor], d_state: list[tf.Tensor]
) -> list[list[Gradient]]:
    """Returns the gradients of theta, state and inputs by the user's function."""
    structures, cell = traced.structures, traced.cell
    assert cell.gradient is not None
    d_values = iter(d_state)
    d_state1 = [
        next(d_values) if is_differentiable(x) else tf.zeros_like(x) for x in arguments.state
    ]
    returned = cell.gradient(
        structures.theta.pack(arguments.theta),
        structures.state.pack(arguments.state),
        structures.inputs.pack(arguments.inputs),
        traced.extras.pack(extras),
        structures.state.pack(d_state1),
    )
    if not isinstance(returned, (tuple, list)) or len(returned) not in (3, 4):
        raise PipelineError(
            f"the cell_grad of {cell.name!r} must return (dtheta, dstate0, dinputs), or these and "
            "None"
        )
    if any(leaf is not None for leaf in tf.nest.flatten(returned[3:])):
        raise PipelineError(
            f"the cell_grad of {cell.name!r} returned gradients of captured tensors, but a cell "
            "with a cell_grad cannot capture any; pass them in theta"
        )
    return [
        structures.theta.gradients(traced.specs.theta, returned[0], "dtheta"),
        structures.state.gradients(traced.specs.state, returned[1], "dstate0"),
        structures.inputs.gradients(traced.specs.inputs, returned[2], "dinputs"),
    ]


def _derived(
    ys: Sequence[tf.Tensor], sources: Sequence[Sequence[tf.Tensor]], d_ys: Sequence[tf.Tensor]
) -> list[list[Gradient]]:
    """Returns the gradients of lists of tensors, given those of the differentiable `ys`."""
    ys = [y for y in ys if is_differentiable(y)]
    xs = [x for part in sources for x in part if is_differentiable(x)]
    grads = iter(tf.gradients(ys, xs, list(d_ys)) if ys and xs else [None] * len(xs))
    return [[next(grads) if is_differentiable(x) else None for x in part] for part in sources]


def _dense(gradients: Sequence[Gradient]) -> list[tf.Tensor | None]:
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


T = TypeVar("T")


def groups(flat: Iterable[T], like: Iterable[Sequence[object]]) -> Iterator[list[T]]:
    """Splits a flat list into lists with the lengths of the given ones."""
    values = iter(flat)
    for part in like:
        yield [next(values) for _ in part]


def stop_condition(
    stop_fn: Callable[[tf.Tensor, Any, Any], Any], structures: Arguments, specs: Arguments
) -> TracedFunction:
    """Returns a function of time step, theta and state: True (a bool scalar) to stop before it."""

    def run(t: tf.Tensor, theta: list[tf.Tensor], state: list[tf.Tensor]) -> tf.Tensor:
        packed = structures.theta.pack(theta), structures.state.pack(state)
        stop = tf.convert_to_tensor(stop_fn(tf.cast(t, tf.int64), *packed))
        if stop.dtype != tf.bool:
            raise PipelineError(f"stop_fn returned {stop.dtype.name}; it must return bool")
        return tf.reduce_all(stop)

    return TracedFunction(run, [_TIME, specs.theta, specs.state], "stop_fn")


class CellOutGradients(NamedTuple):
    """Gradients of the inputs of the function, flat; None where there is none."""

    state: list[tf.Tensor | None]
    captures: list[Gradient]


class CellOut(StepFunction):
    """A function from a cell's state to the inputs of the layer above, traced once."""

    def __init__(
        self,
        name: str,
        forward: Callable[[Any], Any],
        gradient: Callable[[Any], Any] | None,  # of the state, given that of the results
        state: Structure,
        specs: Sequence[tf.TensorSpec],
        device: str,
    ) -> None:
        self.name, self.gradient, self.device = name, gradient, device
        self.state, self.state_specs = state, specs
        self.structure = Structure((), name)

        def run(t: tf.Tensor, flat: list[tf.Tensor]) -> list[tf.Tensor]:
            del t
            outputs = forward(state.pack(flat))
            self.structure = Structure(outputs, f"what {name} returned")
            # An output that is an input gets its own name.
            return [tf.identity(x) for x in self.structure.tensors(outputs)]

        super().__init__(run, [specs], name, device)
        self.specs = specs_of(self.results)
        if not self.specs:
            raise PipelineError(f"{name} returned no tensor; the layer above needs inputs")
        for spec, leaf in zip(self.specs, self.structure.leaf_names, strict=True):
            if not spec.shape.is_fully_defined():
                raise PipelineError(
                    f"{leaf} has shape {spec.shape}; layers need inputs of static shapes: set it "
                    "with tf.ensure_shape"
                )
        captured = [x for x in self.captures if not self.is_key(x)]
        if gradient is not None and captured:
            names = ", ".join(map(self.name_of, captured))
            raise PipelineError(
                f"{name} uses tensors that it was not given: {names}; they would get no gradient, "
                "since the gradient is given by hand; leave it out or put them in the state"
            )


def cell_out_gradient(out: CellOut) -> StepFunction:
    """Returns the gradient of a `CellOut`, for one time step.

    Its arguments are the time step, the flat state, captures, and the gradients of the
    differentiable outputs.
    """

    def run(
        t: tf.Tensor,
        state: list[tf.Tensor],
        captures: list[tf.Tensor],
        d_outputs: list[tf.Tensor],
    ) -> CellOutGradients:
        if out.gradient is None:
            outputs = out(t, state, captures=captures)
            of_state, of_captures = _derived(outputs, [state, captures], d_outputs)
            return CellOutGradients(_dense(of_state), of_captures)
        d_values = iter(d_outputs)
        full = [
            next(d_values) if is_differentiable(spec) else tf.zeros(spec.shape, spec.dtype)
            for spec in out.specs
        ]
        returned = out.gradient(out.structure.pack(full))
        what = f"what the gradient of {out.name} returned"
        of_state = out.state.gradients(out.state_specs, returned, what)
        return CellOutGradients(_dense(of_state), [None for _ in captures])

    d_specs = [spec for spec in out.specs if is_differentiable(spec)]
    parts = [out.state_specs, specs_of(out.captures), d_specs]
    return StepFunction(run, parts, f"the gradient of {out.name}", out.device)
