"""What a function may use besides its arguments.

Functions of slices, and the layer functions of loops, get gradients that are made for their
arguments. A tensor or variable that they take from elsewhere would lose its gradient without a
word, or get that of one processor. So the way from results back to arguments is walked over the
graph; what it meets from outside, and could have a gradient, is an error.
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

# What floating numbers, or the state that they are read from, may be handed on in.
_CARRIERS = (tf.resource, tf.variant)


@contextlib.contextmanager
def check_no_layers_axis(lowering: Lowering) -> Iterator[None]:
    """Checks that a layer function leaves the axis of the layers alone.

    Args:
        lowering: of the tensors inside.

    Raises:
        PipelineError: there is communication along the axis of the layers, where everybody works
            on another microbatch.
    """
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
    """Calls a function that may use floating tensors of `inputs` alone.

    Constants, what comes from `tf.stop_gradient`, and variables that are not trainable have no
    gradient to lose, nor has what is compared or converted to integers. In eager mode there is no
    graph to walk over: trainable variables that are read are noticed, tensors are not.

    Args:
        function: of no arguments.
        inputs: what it may use.
        outputs_of: the tensors of its result.
        error: made of the name of what is used.

    Raises:
        Exception: `error`: it uses something else that would lose its gradient.
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
    """Calls a function of slices that may use floating tensors of its arguments alone.

    Args:
        function: returns a tensor.
        args: its arguments.

    Raises:
        GradientError: it uses something else that would lose its gradient.
        ShapeError: it returns a complex tensor, or none.
    """
    output = call_alone(lambda: function(*args), args, lambda output: [output], _lost_in_map)
    if not isinstance(output, tf.Tensor):
        raise ShapeError(
            f"a function that is mapped over slices returned {output!r}; it returns one tensor"
        )
    check_real(output.dtype, "the result of a function that is mapped over slices")
    return output


def lost_in_layer(what: str) -> Exception:
    """The error of a layer function that uses `what`."""
    return PipelineError(
        f"the layer function uses {what} from outside, which would get no gradient; pass it among "
        "the weights, or through tf.stop_gradient if it is a constant"
    )


def _lost_in_map(what: str) -> Exception:
    """The error of a function of slices that uses `what`."""
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
    """What operations with numbers from `first` on made `outputs` of, besides `inputs`."""
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
        # A tensor of an outer graph enters an inner one when it is used first.
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
    """What a placeholder stands for in its graph; None if it is none that stands for a tensor."""
    if not hasattr(tensor, "op") or tensor.op.type != "Placeholder":
        return None
    key = _key(tensor)
    pairs = getattr(tensor.graph, "captures", [])
    return next((outer for outer, inner in pairs if _key(inner) == key), None)


def _origin(tensor: tf.Tensor) -> Any:
    """The tensor that a capture, of however many graphs, stands for."""
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
