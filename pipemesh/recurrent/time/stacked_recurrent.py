"""A stack of recurrent nets whose layers lie on different devices and compute at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.recurrent.executor import pipeline
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.time.layer_stage import LayerArguments, LayerStage, check_static
from pipemesh.recurrent.time.time_loop import padding_bounds
from pipemesh.schedule import gpipe

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
    """Applies a stack of cells along time, each layer on its device, all at the same time.

    Equal to this loop, outputs and gradients::

        states = list(init_states)
        for t in range(length):
            x = inputs[t]
            for i in range(N):
                states[i], _ = cell_fns[i](thetas[i], states[i], x)
                x = cell_outs[i](states[i])
            over_time[t] = states[N - 1]
        return cell_outs[N - 1](over_time), states

    The layers are the stages of a pipeline, and chunks of time are its microbatches: while a layer
    computes a chunk, the layer below computes the next one. The state goes from chunk to chunk,
    and its gradient back. Within a chunk a layer is a loop of the graph, as in `Recurrent`: the
    backward pass computes each time step again from its stored state. The graph does not grow with
    the length. Random numbers under `plan_free_randomness` are keyed by the time step.

    To be called while a graph is built: in a `tf.function` or a TF1 graph. The signature is that
    of `lingvo.core.recurrent.StackedRecurrent`; what differs is in the README of this package.

    Nested structures are as in `Recurrent`. All shapes must be static, the length in time
    included; any length will do.

    Args:
        devices: names of TensorFlow devices, one a layer; layers may share one.
        cell_fns: the cells, as for `Recurrent`; a list with one a layer, or one for all.
        cell_grads: gradients of one time step of the cells, as for `Recurrent`, None where they
            are derived; a list, or one for all.
        cell_outs: what the layer above gets of a layer's state at one time step, nested tensors;
            a list, or one for all. The last one is applied to all states over time at once, so
            that it should do no more than rename or compute element by element.
        cell_out_grads: gradients of these: each takes that of its outputs and returns that of the
            state, which is added to what else the state's gradient is; None where they are derived.
            A list, or one for all. The last one is not used, since TensorFlow knows the gradient.
        thetas: the weights of each layer.
        init_states: the state of each layer before the first time step.
        inputs: of the first layer, tensors whose dim 0 is time. If it is a dict with the key
            `padding` (of shape [time, ...]; padding is what is True or not 0), all layers skip the
            time steps before the first and after the last that is not padding for everybody: they
            leave states as they are, and the last layer's states over time are zeros there.
        accumulator_layers: for each layer an object with `GetAccumulatorValues` and
            `SetAccumulatorValues`, or None. Accumulators go from time step to time step, without
            gradient, and to the object.
        unused_acc_state: says that no cell reads the state that it is given, so that only inputs
            are kept for the backward pass; `init_states` get no gradient then.
        num_chunks: into how many chunks the time is cut; the results do not depend on it. More
            chunks leave devices idle for a smaller part of the time, `(N - 1) / (num_chunks + N -
            1)`, but cost more time to start. By default four a layer, or a chunk a time step if
            these are fewer; and one if all layers share a device. All chunks but the last are
            equally long, so there may be fewer.
        remat: `none` keeps the states of all time steps for the backward pass, as `Recurrent` does;
            `full` keeps those between chunks alone and computes each chunk's once more.

    Returns:
        What the last of `cell_outs` makes of the last layer's states over time, and the list of
        the layers' final states.

    Raises:
        PipelineError: lists differ in length, a shape is not static, a cell has side effects or
            reads variables in a branch or a loop, a cell with a cell_grad captures tensors, a cell
            reads the state despite `unused_acc_state`, returns what does not fit, or there is no
            graph.

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
        cell_fns,
        cell_grads,
        cell_outs,
        cell_out_grads,
        thetas,
        init_states,
        accumulator_layers,
    )
    if tf.executing_eagerly():
        raise PipelineError("StackedRecurrent is part of a graph; call it inside a tf.function")
    structure = Structure(inputs, "inputs")
    with tf.name_scope("stacked_recurrent"):
        with tf.device(devices[0]):
            sequence = structure.tensors(inputs)
            length = _length(sequence, structure.leaf_names)
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
            # Each chunk is a loop of its own; in a graph with all of them they would cost too much.
            options=Options(remat=remat, loop=True),
        )
        states = [layer.finish(carry) for layer, carry in zip(made, carries, strict=True)]
        with tf.device(devices[-1]):
            output = made[-1].structures.state.pack([x[:length] for x in over_time])
            return _per_layer(cell_outs, "cell_outs", len(devices))[-1](output), states


def _layers(
    devices: Sequence[str],
    cell_fns: PerLayer,
    cell_grads: PerLayer,
    cell_outs: PerLayer,
    cell_out_grads: PerLayer,
    thetas: Sequence[Nested],
    init_states: Sequence[Nested],
    accumulator_layers: Sequence[Any] | None,
) -> list[LayerArguments]:
    """What the user gives for each layer."""
    count = len(devices)
    if count == 0:
        raise PipelineError("there are no devices; a stack needs at least one layer")
    for name, given in (("thetas", thetas), ("init_states", init_states)):
        if not isinstance(given, (list, tuple)):
            raise PipelineError(f"{name} is {type(given).__name__}; it must be a list of {count}")
    if len(thetas) != count:
        raise PipelineError(
            f"{count} devices, but {len(thetas)} thetas; each layer needs one of both"
        )
    meters = [None] * count if accumulator_layers is None else list(accumulator_layers)
    present = [id(x) for x in meters if x is not None]
    if len(set(present)) < len(present):
        raise PipelineError(
            "accumulator_layers has the same layer twice, whose accumulators would be those of one "
            "of them; give each layer of the stack its own"
        )
    columns = [
        _per_layer(given, name, count)
        for name, given in (
            ("cell_fns", cell_fns),
            ("cell_grads", cell_grads),
            ("cell_outs", cell_outs),
            ("cell_out_grads", cell_out_grads),
            ("thetas", thetas),
            ("init_states", init_states),
            ("accumulator_layers", meters),
        )
    ]
    layers = [
        LayerArguments(number, *parts)
        for number, parts in enumerate(zip(devices, *columns, strict=True))
    ]
    # What the last one gives leaves the pipeline, and is TensorFlow's own.
    layers[-1] = layers[-1]._replace(cell_out=None, cell_out_grad=None)
    return layers


def _per_layer(given: PerLayer, name: str, count: int) -> list[Any]:
    """One for each layer."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise PipelineError(
            f"{len(given)} {name}, but {count} devices; each layer needs one of both"
        )
    return list(given)


def _length(inputs: Sequence[tf.Tensor], names: Sequence[str]) -> int:
    """The number of time steps."""
    if not inputs:
        raise PipelineError("the inputs have no tensor in them; dim 0 of the inputs is time")
    for tensor, name in zip(inputs, names, strict=True):
        check_static(name, tensor)
        if tensor.shape.rank == 0:
            raise PipelineError(f"{name} is a scalar; it needs a dim 0, which is time")
    lengths = {name: static_sizes(x)[0] for x, name in zip(inputs, names, strict=True)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise PipelineError(f"the inputs differ in dim 0, which is time: {listed}")
    return next(iter(lengths.values()))


def _cut(length: int, num_chunks: int | None, devices: Sequence[str]) -> tuple[int, int]:
    """The number of chunks, and how many time steps each of them has."""
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
    """The tensor with time steps behind its last, which are skipped."""
    if count == 0:
        return tensor
    return tf.concat([tensor, tf.zeros([count, *tensor.shape[1:]], tensor.dtype)], axis=0)
