"""Checks that a function gets all differentiable values through its arguments.

Functions of slices and layer functions of loops get gradients for their arguments alone. A tensor
or variable from outside would silently lose its gradient, or get the gradient of one processor. So
this module walks the graph from results back to arguments. A differentiable value from outside is
an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from pipemesh.backend.gradients import variables_read
from pipemesh.backend.operation_kinds import IDENTITIES, WITHOUT_GRADIENT
from pipemesh.backend.operations import next_operation_number, operation_number
from pipemesh.errors import GradientError, PipelineError, ShapeError
from pipemesh.lowering.given import check_real
from pipemesh.lowering.lowering import Lowering
from pipemesh.mesh.mesh import LAYERS_AXIS

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
    """Calls a function that may use no floating tensors except `inputs`.

    Allowed are constants, results of `tf.stop_gradient` and variables that are not trainable: they
    have no gradient to lose. Comparisons and conversions to integers are allowed too. Eager mode
    has no graph: it detects reads of trainable variables, but not of tensors.

    Args:
        function: called without arguments.
        inputs: the tensors that it may use.
        outputs_of: returns the tensors of its result.
        error: makes the exception to raise from the name of the value that would lose its gradient.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    first = 0 if graph is None else next_operation_number(graph)
    with variables_read() as watcher:
        result = function()
    read = watcher.watched_variables()
    if graph is None:
        found = [f"the variable {variable.name!r}" for variable in read]
    else:
        found = _from_outside(graph, first, inputs, outputs_of(result), read)
    if found:
        raise error(found[0])
    return result


def call_local(function: Callable[..., tf.Tensor], args: Sequence[tf.Tensor]) -> tf.Tensor:
    """Calls a function of slices that may use no floating tensors except its arguments."""
    output = call_alone(lambda: function(*args), args, lambda output: [output], _lost_in_map)
    if not isinstance(output, tf.Tensor):
        raise ShapeError(
            f"a function that is mapped over slices returned {output!r}; it returns one tensor"
        )
    check_real(output.dtype, "the result of a function that is mapped over slices")
    return output


def lost_in_layer(what: str) -> Exception:
    """Returns the error of a layer function that uses `what`."""
    return PipelineError(
        f"the layer function uses {what} from outside, which would get no gradient; pass it among "
        "the weights, or through tf.stop_gradient if it is a constant"
    )


def _lost_in_map(what: str) -> Exception:
    """Returns the error of a function of slices that uses `what`."""
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
    found: list[str] = []
    seen = set(allowed)
    todo = [tensor for tensor in outputs if _carries_gradient(tensor)]
    while todo:
        tensor = todo.pop()
        key = _key(tensor)
        if key in seen:
            continue
        seen.add(key)
        # A tensor of an outer graph enters an inner graph at its first use.
        given = _captured(tensor)
        if given is None and operation_number(tensor.op) >= first:
            if tensor.op.type not in WITHOUT_GRADIENT:
                todo += [source for source in tensor.op.inputs if _carries_gradient(source)]
        elif tensor.dtype == tf.resource:
            variable = handles.get(_key(_origin(tensor)))
            if variable is not None:
                found.append(f"the variable {variable.name!r}")
        elif _key(tensor if given is None else given) not in allowed and not _is_constant(tensor):
            found.append(_named(tensor if given is None else given))
    return found


def _named(tensor: tf.Tensor) -> str:
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
