"""Gradients with respect to tensors with named dims, and of functions of slices.

Functions of slices and layer functions of loops get gradients for their arguments alone. A tensor
or variable from outside would silently lose its gradient, or get the gradient of one processor. So
`call_alone` walks the graph from results back to arguments. A differentiable value from outside is
an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from pipemesh.backend.devices import is_device
from pipemesh.backend.gradients import (
    attach_gradient,
    is_recorded,
    is_recorded_twice,
    unrecorded,
    variables_read,
)
from pipemesh.backend.operation_kinds import IDENTITIES, WITHOUT_GRADIENT
from pipemesh.backend.operations import next_operation_number, operation_number
from pipemesh.errors import GradientError, PipelineError, ShapeError
from pipemesh.lowering.arguments import described
from pipemesh.lowering.lowering import Lowering, check_real
from pipemesh.lowering.tensor import Tensor
from pipemesh.lowering.variable import Variable
from pipemesh.mesh.mesh import LAYERS_AXIS


@tf.autograph.experimental.do_not_convert
def gradients(loss: Tensor, sources: Any, tape: tf.GradientTape | None = None) -> Any:
    """Returns gradients of a loss: equal under every layout and lowering, eagerly and in graphs.

    Under placement each processor has a copy of the loss, and only all copies together have the
    whole gradient: `tape.gradient(loss.slices[0], ...)` gives a part of it. `tape.gradient(loss,
    ...)` is right too; this function also checks its arguments and supports variables.

    Args:
        loss: a floating tensor; if it has dims, the sum of its elements is differentiated.
        sources: a nest of tensors, `Variable` objects, and TensorFlow's tensors or variables, such
            as imported ones or slices.
        tape: recorded the computation of the loss and watched the sources. Not needed in graphs of
            TensorFlow 1 and in a `tf.function`.

    Returns:
        The structure of `sources`. Tensors and `Variable` objects get tensors of the same shape and
        layout; TensorFlow's get TensorFlow's tensors. A source that the loss does not depend on, or
        that the tape did not watch, gets None.

    Raises:
        GradientError: there is neither a tape nor a graph, or a dtype is not floating.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.lowering import PlacementLowering, ops
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("hidden:model")
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> w = ops.import_tensor(lowering, [1.0, 2.0, 3.0, 4.0], "hidden:4")
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(w)
        ...     loss = ops.reduce_sum(w * w)
        >>> ops.gradients(loss, {"w": w}, tape)["w"].numpy().tolist(), float(loss)
        ([2.0, 4.0, 6.0, 8.0], 30.0)
    """
    if not isinstance(loss, Tensor) or not loss.dtype.is_floating:
        raise GradientError(
            f"the loss is {described(loss)}; it is a floating tensor with named dims, or with "
            "none, such as ops.reduce_mean(x)"
        )
    flat = tf.nest.flatten(sources)
    parts = [list(part.variables) if isinstance(part, Variable) else [part] for part in flat]
    for part in (part for group in parts for part in group):
        if not hasattr(part, "dtype") or not tf.as_dtype(part.dtype).is_floating:
            raise GradientError(
                f"{described(part)} has no gradient; sources are tensors and variables of a "
                "floating dtype"
            )
    grads_of_parts = _differentiate(loss.slices, parts, tape)
    loss.lowering.warn_of_misspelt_rules()
    return tf.nest.pack_sequence_as(
        sources,
        [
            _named_gradient(loss, part, grads) if isinstance(part, Variable) else grads[0]
            for part, grads in zip(flat, grads_of_parts, strict=True)
        ],
    )


def _differentiate(
    slices: Sequence[tf.Tensor], parts: list[list[Any]], tape: tf.GradientTape | None
) -> list[list[Any]]:
    if tape is not None:
        grads_of_parts: Any = tape.gradient(list(slices), parts)
        return grads_of_parts
    if tf.executing_eagerly():
        raise GradientError(
            "without a graph, gradients need the tape that recorded the computation: with "
            "tf.GradientTape() as tape: tape.watch(w); loss = ...; then ops.gradients(loss, w, "
            "tape)"
        )
    grads = iter(tf.gradients(list(slices), [part for group in parts for part in group]))
    return [[next(grads) for _ in group] for group in parts]


def _named_gradient(loss: Tensor, variable: Variable, grads: Sequence[Any]) -> Tensor | None:
    if len(grads) != loss.lowering.num_slices:
        raise GradientError(
            f"variable {variable.name!r} has {len(grads)} slices in this process, but the loss was "
            f"computed for {loss.lowering.num_slices} processors; a core differentiates by the "
            "slice that is its argument"
        )
    return Tensor.__tf_unflatten__((loss.lowering, variable.layout.shape), tuple(grads))


def local_gradient(
    function: Callable[..., Sequence[tf.Tensor]], tensors: Sequence[tf.Tensor], device: str
) -> list[tf.Tensor]:
    """Calls a function, checked by `call_local`, on a device and computes its gradient there."""
    # TensorFlow's autodiff forgets device scopes: it would compute all gradients on the first
    # device. Eager mode keeps that behavior.
    with tf.device(device):
        if tf.executing_eagerly():
            return call_local(function, tensors)
        args = _separate(tensors, device)
        floating = [i for i, arg in enumerate(args) if arg.dtype.is_floating]
        sources = [args[i] for i in floating]
        # This tape sees the local operations alone. `tf.gradients` would search all later
        # operations for each function again. Other tapes do not watch the identities and record
        # nothing.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(sources)
            outputs = call_local(function, args)
            # `tf.stop_gradient` and comparisons end what a tape records.
            numbers = [i for i, x in enumerate(outputs) if x.dtype.is_floating and is_recorded([x])]
        if not numbers:
            return outputs
        results = [outputs[i] for i in numbers]

        def backward(grads: Sequence[Any]) -> Sequence[Any]:
            with tf.device(device):
                return tape.gradient(results, sources, list(grads))

        inputs = [tensors[i] for i in floating]
        attached = attach_gradient(results, inputs, backward, across_devices=False)
        for i, result in zip(numbers, attached, strict=True):
            outputs[i] = result
        return outputs


def _separate(tensors: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """Returns the tensors on a device, each a tensor of its own that no tape watches, unless it may
    compute a second derivative.
    """
    # A tensor that occurs twice would get the whole gradient twice, and a tape that watches it
    # would record what the function does. Where neither may be, as in the stages of a pipeline, an
    # identity would only be one more operation, for each argument of each function.
    graph = tf.compat.v1.get_default_graph()
    # A second derivative differentiates operations that use the identities, so tapes that may
    # compute one watch them.
    higher = is_recorded_twice(tensors)
    as_they_are = [
        isinstance(tensor, tf.Tensor)
        and getattr(tensor, "graph", None) is graph
        and is_device(tensor.device, device)
        and not is_recorded([tensor])
        and not any(tensor is other for other in tensors[:i])
        for i, tensor in enumerate(tensors)
    ]
    with contextlib.nullcontext() if higher else unrecorded():
        return [
            tensor if is_own else tf.identity(tensor)
            for tensor, is_own in zip(tensors, as_they_are, strict=True)
        ]


T = TypeVar("T")

# The dtypes that carry floating numbers, or the state that they are read from.
_CARRIERS = (tf.resource, tf.variant)


@contextlib.contextmanager
def check_no_layers_axis(lowering: Lowering) -> Iterator[None]:
    """Checks that a layer function does not communicate along the axis of the layers."""
    rows = dict(lowering.costs.rows)
    yield
    for key, row in lowering.costs.rows.items():
        if LAYERS_AXIS in key[0] and rows.get(key) != row:
            raise PipelineError(
                f"the layer function communicates along axis {LAYERS_AXIS!r} ({key[1]}), where "
                "every stage works on another microbatch; change the rule that splits a dim of its "
                "tensors over this axis"
            )


def call_alone(
    function: Callable[[], T],
    inputs: Sequence[tf.Tensor],
    outputs_of: Callable[[T], Sequence[tf.Tensor]],
    error: Callable[[str], Exception],
) -> T:
    """Calls a function; if a floating value besides `inputs` would lose its gradient, raises
    `error` of that value's name.
    """
    # Allowed are constants, results of `tf.stop_gradient` and variables that are not trainable:
    # they have no gradient to lose. Comparisons and conversions to integers are allowed too. Eager
    # mode has no graph: it detects reads of trainable variables, but not of tensors.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    first = 0 if graph is None else next_operation_number(graph)
    with variables_read() as watcher:
        result = function()
    variables = watcher.watched_variables()
    if graph is None:
        lost = [f"the variable {variable.name!r}" for variable in variables]
    else:
        lost = _from_outside(graph, first, inputs, outputs_of(result), variables)
    if lost:
        raise error(lost[0])
    return result


def call_local(
    function: Callable[..., Sequence[tf.Tensor]], args: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a function of slices that may use no floating tensors except its arguments."""

    def call() -> list[tf.Tensor]:
        outputs = list(function(*args))
        for output in outputs:
            if not isinstance(output, tf.Tensor):
                raise ShapeError(
                    f"a function that is mapped over slices returned {output!r}; it returns one "
                    "tensor"
                )
        return outputs

    outputs = call_alone(call, args, lambda outputs: outputs, _lost_in_map)
    for output in outputs:
        check_real(output.dtype, "the result of a function that is mapped over slices")
    return outputs


def lost_in_layer(what: str) -> Exception:
    """Returns the error of a layer function that uses `what`."""
    return PipelineError(
        f"the layer function uses {what} from outside, which would get no gradient; pass it among "
        "the weights, or through tf.stop_gradient if it is a constant"
    )


def _lost_in_map(what: str) -> Exception:
    return GradientError(
        f"a function that is mapped over slices uses {what} from outside, whose gradient would be "
        "lost, or one processor's; make it an operand (ops.import_tensor(...).slices, or "
        "Variable.tensor(...).slices), or pass it through tf.stop_gradient if it is a constant"
    )


def _key(tensor: tf.Tensor) -> Any:
    if hasattr(tensor, "op") and hasattr(tensor, "graph"):
        return id(tensor.graph), operation_number(tensor.op), tensor.value_index
    return id(tensor)


def _from_outside(
    graph: tf.Graph,
    first: int,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
) -> list[str]:
    """Returns values besides `inputs` that operations from number `first` on use for `outputs`."""
    allowed = {_key(tensor) for tensor in inputs}
    handles = {
        _key(_origin(variable.handle)): variable
        for variable in variables
        if hasattr(variable, "handle")
    }
    lost: list[str] = []
    seen = set(allowed)
    todo = [tensor for tensor in outputs if _carries_gradient(tensor)]
    while todo:
        tensor = todo.pop()
        key = _key(tensor)
        if key in seen:
            continue
        seen.add(key)
        # A tensor of an outer graph enters an inner graph at its first use.
        captured = _captured(tensor)
        if captured is None and operation_number(tensor.op) >= first:
            if tensor.op.type not in WITHOUT_GRADIENT:
                todo += [source for source in tensor.op.inputs if _carries_gradient(source)]
        elif tensor.dtype == tf.resource:
            variable = handles.get(_key(_origin(tensor)))
            if variable is not None:
                lost.append(f"the variable {variable.name!r}")
        elif _key(tensor if captured is None else captured) not in allowed and not _is_constant(
            tensor
        ):
            lost.append(_named_value(tensor if captured is None else captured))
    return lost


def _named_value(tensor: tf.Tensor) -> str:
    name = getattr(tensor, "name", None) if hasattr(tensor, "op") else None
    return f"the tensor {name!r}" if name else f"a tensor of sizes {list(tensor.shape)}"


def _carries_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype in _CARRIERS


def _captured(tensor: tf.Tensor) -> Any:
    """Returns the outer tensor that a placeholder captures, or None if it captures none."""
    if not hasattr(tensor, "op") or tensor.op.type != "Placeholder":
        return None
    key = _key(tensor)
    pairs = getattr(tensor.graph, "captures", [])
    return next((outer for outer, inner in pairs if _key(inner) == key), None)


def _origin(tensor: tf.Tensor) -> Any:
    """Returns the outermost tensor behind a chain of captures."""
    outer = _captured(tensor)
    while outer is not None:
        tensor, outer = outer, _captured(outer)
    return tensor


def _is_constant(tensor: tf.Tensor) -> bool:
    tensor = _origin(tensor)
    while hasattr(tensor, "op"):
        if tensor.op.type not in IDENTITIES:
            return tensor.op.type in WITHOUT_GRADIENT
        tensor = _origin(tensor.op.inputs[tensor.value_index])
    return False
