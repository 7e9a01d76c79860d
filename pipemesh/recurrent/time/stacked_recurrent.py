"""A stack of recurrent nets whose layers are on different devices and run concurrently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.recurrent.executor import pipeline
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.tracing import specs_of
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.time.cell import (
    Arguments,
    Cell,
    CellOut,
    TracedCell,
    groups,
)
from pipemesh.recurrent.time.time_loop import (
    Captures,
    Span,
    TimeLoop,
    check_lengths,
    padding_bounds,
    run_loop,
)
from pipemesh.schedule import gpipe


class LayerArguments(NamedTuple):
    """The user's arguments for one layer."""

    number: int
    device: str
    cell_fn: Callable[[Any, Any, Any], tuple[Any, Any]]
    cell_grad: Callable[..., Sequence[Any]] | None
    # maps its state to the inputs of the layer above; None for the last layer
    cell_out: Callable[[Any], Any] | None
    cell_out_grad: Callable[[Any], Any] | None
    theta: Any
    state0: Any
    accumulator_layer: Any  # has GetAccumulatorValues and SetAccumulatorValues; or None


class LayerStage:
    """A recurrent layer, traced for one time step, as a stage with chunks of time."""

    def __init__(
        self,
        arguments: LayerArguments,
        inputs: Structure,
        input_specs: Sequence[tf.TensorSpec],
        unused_state: bool,
    ) -> None:
        number, layer = arguments.number, arguments.accumulator_layer
        self._arguments = arguments
        accumulators = layer.GetAccumulatorValues() if layer is not None else ()
        parts = (arguments.theta, arguments.state0, accumulators)
        names = (f"thetas[{number}]", f"init_states[{number}]", f"the accumulators of {number}")
        of_parts = list(map(Structure, parts, names))
        self.structures = Arguments(*[*of_parts, inputs])
        with tf.device(arguments.device):
            self._theta, state, values = (
                structure.tensors(part) for structure, part in zip(of_parts, parts, strict=True)
            )
        if not state:
            raise PipelineError(
                f"{names[1]} has no tensor in it, so that there is nothing to compute"
            )
        for structure, tensors in zip(of_parts, (self._theta, state, values), strict=True):
            _check_static(structure.leaf_names, tensors)
        # State and accumulators before the first time step.
        self._carry = [
            [tf.stop_gradient(x) for x in state] if unused_state else state,
            [tf.stop_gradient(x) for x in values],
        ]
        specs = Arguments(*[*map(specs_of, [self._theta, *self._carry]), list(input_specs)])
        function = arguments.cell_fn
        cell = Cell(
            f"{getattr(function, '__name__', type(function).__name__)} of layer {number}",
            function,
            arguments.cell_grad,
            layer,
            None,
            lambda _: arguments.cell_grad is None,
            arguments.device,
        )
        traced = TracedCell(cell, self.structures, specs)
        read = traced.state_read()
        if unused_state and read:
            raise PipelineError(
                f"unused_acc_state is True, which says that no cell reads the state it is given, "
                f"but what the cell {cell.name!r} returns depends on {', '.join(read)}; leave "
                "unused_acc_state out"
            )
        # Structure of its outputs to the layer above; None for the last layer.
        self.outputs, self.output_specs = None, []
        out = None
        if arguments.cell_out is not None:
            out = CellOut(
                f"cell_outs[{number}]",
                arguments.cell_out,
                arguments.cell_out_grad,
                self.structures.state,
                specs.state,
                cell.device,
            )
            self.outputs, self.output_specs = out.structure, out.specs
        # A user-defined gradient may read more than the cell does.
        reads_state = bool(read) or (cell.gradient is not None and not unused_state)
        self._loop = TimeLoop(traced, out=out, reads_state=reads_state)
        keep_alive(self)

    def stage(self, bounds: Sequence[tf.Tensor], chunk: int) -> Stage:
        """Returns the stage for chunks of time between `bounds`, the second one excluded."""
        captures = self._loop.captures
        weights = [self._theta, captures.cell, captures.out, list(bounds)]

        def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
            del step
            theta, cell_captures, out_captures, (begin, end) = groups(theta, weights)
            state, accumulators = groups(carry, self._carry)
            first = tf.cast(microbatch, tf.int32) * chunk
            span = Span(
                first,
                tf.clip_by_value(begin - first, 0, chunk),
                tf.clip_by_value(end - first, 0, chunk),
            )
            results = run_loop(
                self._loop,
                Arguments(theta, state, accumulators, list(inputs)),
                Captures(cell_captures, out_captures, []),
                span,
            )
            # The only outputs of the last layer are its states.
            outputs = results.acc_out if self._loop.out else results.acc_state
            return outputs, [*results.state, *results.accumulators]

        return Stage(
            self._loop.cell.cell.name,
            forward,
            [x for part in weights for x in part],
            [x for part in self._carry for x in part],
            self._arguments.device,
            recurrent=True,
        )

    def finish(self, carry: Sequence[tf.Tensor]) -> Any:
        """Gives the accumulators to their layer and returns the nested final state."""
        state, accumulators = groups(carry, self._carry)
        if self._arguments.accumulator_layer is not None:
            values = [tf.stop_gradient(x) for x in accumulators]
            packed = self.structures.accumulators.pack(values)
            self._arguments.accumulator_layer.SetAccumulatorValues(packed)
        return self.structures.state.pack(state)


def _check_static(names: Sequence[str], tensors: Sequence[tf.Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if not tensor.shape.is_fully_defined():
            raise PipelineError(
                f"{name} has shape {tensor.shape}; StackedRecurrent needs static shapes, time "
                "included: pad to a fixed length (padding steps are skipped) and set the shape "
                "with tf.ensure_shape, or apply Recurrent layer by layer, which takes any length"
            )


Nested = Any
PerLayer = Any
_CHUNKS_PER_LAYER = 4


def StackedRecurrent(
    devices: Sequence[str],
    cell_fns: PerLayer,
    cell_grads: PerLayer,
    cell_outs: PerLayer,
    cell_out_grads: PerLayer,
    thetas: Sequence[Nested],
    init_states: Sequence[Nested],
    inputs: Nested,
    accumulator_layers: Sequence[Any] | None = None,
    unused_acc_state: bool = False,
    *,
    num_chunks: int | None = None,
    remat: str = "none",
) -> tuple[Nested, list[Nested]]:
    """Applies a stack of cells along time; the layers run concurrently, each on its device.

    Outputs and gradients are equal to those of this loop::

        states = list(init_states)
        for t in range(length):
            x = inputs[t]
            for i in range(N):
                states[i], _ = cell_fns[i](thetas[i], states[i], x)
                x = cell_outs[i](states[i])
            over_time[t] = states[N - 1]
        return cell_outs[N - 1](over_time), states

    The layers are the stages of a pipeline, and chunks of time are its microbatches: while a layer
    computes a chunk, the layer below computes the next one. Within a chunk a layer is a loop of the
    graph, as in `Recurrent`: the backward pass recomputes each time step from its stored state.
    Random numbers under `plan_free_randomness` are keyed by the time step.

    Call it in a `tf.function` or a TF1 graph. All shapes must be static, including the length in
    time. The signature is that of `lingvo.core.recurrent.StackedRecurrent`; the README of this
    package lists the differences. Nested structures, cells and their gradients are as in
    `Recurrent`. Each of `cell_fns`, `cell_grads`, `cell_outs` and `cell_out_grads` is a list with
    one per layer, or one for all.

    Args:
        devices: names of TensorFlow devices, one per layer; layers may share one.
        cell_fns: the cells.
        cell_grads: gradients of one time step of the cells; None derives them automatically.
        cell_outs: functions from a layer's state at one time step to the inputs of the layer above,
            nested tensors. The last one gets all states over time at once, so it should only rename
            tensors or compute element by element.
        cell_out_grads: gradients of `cell_outs`: each takes the gradient of its outputs and returns
            a gradient of the state, which is added to the others; None derives it automatically.
            The last one is ignored, because TensorFlow computes that gradient.
        thetas: the weights of each layer.
        init_states: the state of each layer before the first time step.
        inputs: of the first layer, tensors whose dim 0 is time, with `padding` as in `Recurrent`:
            all layers skip leading and trailing time steps that are padding for all examples.
            States stay unchanged, and the last layer's states over time are zeros there.
        accumulator_layers: for each layer an object as in `Recurrent`, or None.
        unused_acc_state: promises that no cell reads its input state. Then only inputs are kept for
            the backward pass, and `init_states` get no gradient.
        num_chunks: number of chunks of time; the results do not depend on it. More chunks reduce
            the idle share of the devices, `(N - 1) / (num_chunks + N - 1)`, but add overhead. The
            default is four per layer, at most one per time step, and one if all layers share a
            device. All chunks but the last have the same length, so there may be fewer.
        remat: `none` keeps the states of all time steps for the backward pass; `full` keeps only
            the states between chunks and recomputes the others.

    Returns:
        The result of the last of `cell_outs` for the last layer's states over time, and the list of
        the layers' final states.

    Raises:
        PipelineError: lists differ in length, a shape is not static, no graph is being built, a
            cell reads the state despite `unused_acc_state`; or as in `Recurrent`.

    Example:
        >>> import tensorflow as tf
        >>> def cell(theta, state, inputs):
        ...     return {"sum": theta["decay"] * state["sum"] + inputs["x"]}, ()
        >>> def out(state):
        ...     return {"x": state["sum"]}
        >>> decays = [tf.Variable(0.5), tf.Variable(0.25)]
        >>> @tf.function
        ... def run(x):
        ...     with tf.GradientTape() as tape:
        ...         thetas = [{"decay": decay} for decay in decays]
        ...         over_time, final = StackedRecurrent(
        ...             ["CPU:0", "CPU:0"], cell, None, out, None, thetas, [{"sum": 0.0}] * 2,
        ...             {"x": x}, num_chunks=2
        ...         )
        ...     return over_time["x"], tape.gradient(final[1]["sum"], decays)
        >>> y, grads = run(tf.constant([4.0, 2.0, 1.0]))
        >>> [float(x) for x in y], [float(grad) for grad in grads]
        ([4.0, 5.0, 4.25], [7.0, 6.0])
    """
    layers = _layers(
        devices,
        cell_fns=cell_fns,
        cell_grads=cell_grads,
        cell_outs=cell_outs,
        cell_out_grads=cell_out_grads,
        thetas=thetas,
        init_states=init_states,
        accumulator_layers=accumulator_layers,
    )
    if tf.executing_eagerly():
        raise PipelineError("StackedRecurrent is part of a graph; call it inside a tf.function")
    structure = Structure(inputs, "inputs")
    with tf.name_scope("stacked_recurrent"):
        with tf.device(devices[0]):
            sequence = structure.tensors(inputs)
            _check_static(structure.leaf_names, sequence)
            check_lengths(sequence, structure.leaf_names)
            length = static_sizes(sequence[0])[0]
            bounds = padding_bounds(structure.pack(sequence), tf.constant(length))
            count, chunk = _cut(length, num_chunks, devices)
            padded = [_pad(x, count * chunk - length) for x in sequence]
        specs: Sequence[Any] = [tf.TensorSpec(x.shape[1:], x.dtype) for x in sequence]
        made: list[LayerStage] = []
        for layer in layers:
            made.append(LayerStage(layer, structure, specs, unused_acc_state))
            if made[-1].outputs is not None:
                structure, specs = made[-1].outputs, made[-1].output_specs
        over_time, carries = pipeline(
            [layer.stage(bounds, chunk) for layer in made],
            padded,
            gpipe(len(made), count),
            # Each chunk is its own loop; one graph with all of them would be too expensive.
            options=Options(remat=remat, loop=True),
        )
        states = [layer.finish(carry) for layer, carry in zip(made, carries, strict=True)]
        with tf.device(devices[-1]):
            output = made[-1].structures.state.pack([x[:length] for x in over_time])
            return _per_layer(cell_outs, "cell_outs", len(devices))[-1](output), states


def _layers(devices: Sequence[str], **arguments: PerLayer) -> list[LayerArguments]:
    """Returns the user's arguments for each layer."""
    count = len(devices)
    if count == 0:
        raise PipelineError("there are no devices; a stack needs at least one layer")
    # Any iterable, such as the values of a dict.
    accumulator_layers = arguments["accumulator_layers"]
    if accumulator_layers is None:
        arguments["accumulator_layers"] = [None] * count
    elif isinstance(accumulator_layers, Iterable):
        arguments["accumulator_layers"] = list(accumulator_layers)
    for name in ("thetas", "init_states", "accumulator_layers"):
        if not isinstance(arguments[name], (list, tuple)):
            kind = type(arguments[name]).__name__
            raise PipelineError(f"{name} is {kind}; it must be a list of {count}")
    columns = [_per_layer(argument, name, count) for name, argument in arguments.items()]
    layers = [
        LayerArguments(number, *parts)
        for number, parts in enumerate(zip(devices, *columns, strict=True))
    ]
    present = [id(x) for x in arguments["accumulator_layers"] if x is not None]
    if len(set(present)) < len(present):
        raise PipelineError(
            "accumulator_layers has the same layer twice, whose accumulators would be those of one "
            "of them; give each layer of the stack its own"
        )
    # The outputs of the last layer leave the pipeline, so TensorFlow computes their gradient.
    layers[-1] = layers[-1]._replace(cell_out=None, cell_out_grad=None)
    return layers


def _per_layer(argument: PerLayer, name: str, count: int) -> list[Any]:
    """Returns one for each layer."""
    if not isinstance(argument, (list, tuple)):
        return [argument] * count
    if len(argument) != count:
        raise PipelineError(
            f"{len(argument)} {name}, but {count} devices; each layer needs one of both"
        )
    return list(argument)


def _cut(length: int, num_chunks: int | None, devices: Sequence[str]) -> tuple[int, int]:
    """Returns the number of chunks and of time steps in each."""
    if num_chunks is None:
        num_chunks = _CHUNKS_PER_LAYER * len(devices) if len(set(devices)) > 1 else 1
        num_chunks = min(num_chunks, max(length, 1))
    elif not 1 <= num_chunks <= max(length, 1):
        raise PipelineError(
            f"num_chunks is {num_chunks}; {length} time steps can be cut into 1 to {length} chunks"
        )
    # Without any time step there is one chunk of padding.
    chunk = max(-(-length // num_chunks), 1)
    return max(-(-length // chunk), 1), chunk


def _pad(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the tensor with extra time steps at its end, which are skipped."""
    if count == 0:
        return tensor
    return tf.concat([tensor, tf.zeros([count, *tensor.shape[1:]], tensor.dtype)], axis=0)
