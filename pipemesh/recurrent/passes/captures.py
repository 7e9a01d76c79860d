"""Tensors and variables that a traced function uses besides its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.operation_kinds import VARIABLES, WITHOUT_GRADIENT
from pipemesh.backend.static_shape import dtype_behind
from pipemesh.backend.structure import is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.graph_cut import tensor_name
from pipemesh.recurrent.passes.pieces import Cutting

_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"))
# Operations that look up rows of a variable, and of a tensor.
_LOOKUPS = {"ResourceGather": "Gather", "ResourceGatherNd": "GatherNd"}


@dataclasses.dataclass(frozen=True)
class Captured:
    """A weight, or other numeric tensor, that a stage uses but that is not in its theta."""

    outer: tf.Tensor  # the value outside, which gradients flow to
    name: str  # of the placeholder of the value in the graph
    source: tf.Tensor  # to differentiate: the placeholder, or the handle of a variable
    reads: tuple[str, ...]  # other tensors of the graph with the same value
    handle: str | None  # of the variable in the graph; None for a captured tensor
    given: tf.Tensor  # what the function captures: the value, or the handle of a variable


def captured_weights(graph: tf.Graph) -> list[Captured]:
    """Returns the numeric tensors and variables that a function has captured, without constants.

    The function's graph gets an operation for each captured variable, so call it while the graph
    around the function is built.
    """
    weights = []
    for outer, inner in list(graph.captures):
        if outer.dtype == tf.resource:
            weight = _variable(graph, outer, inner)
            if weight is not None:
                weights.append(weight)
        elif _is_number(outer.dtype) and not is_constant(outer):
            # A TF1 variable that is not a resource is read here, once.
            value = outer if outer.dtype == outer.dtype.base_dtype else tf.identity(outer)
            weights.append(Captured(value, inner.name, inner, (), None, outer))
    return weights


def _variable(graph: tf.Graph, outer: tf.Tensor, inner: tf.Tensor) -> Captured | None:
    dtype = dtype_behind(inner)
    if dtype is None or not _is_number(dtype):
        return None
    reads = [
        op.outputs[0].name
        for op in graph.get_operations()
        if op.type == "ReadVariableOp" and op.inputs[0] is inner
    ]
    with graph.as_default(), tf.control_dependencies(None):
        value = tf.raw_ops.ReadVariableOp(resource=inner, dtype=dtype)
    # The variable may be elsewhere; the user of it is on the stage's device.
    with tf.device(None):
        read = tf.raw_ops.ReadVariableOp(resource=outer, dtype=dtype)
    # If the value has no gradient, the handle has none, either.
    source = inner if is_differentiable(value) else value
    return Captured(read, value.name, source, tuple(reads), inner.name, outer)


def _is_number(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool


def check_batch(graph: tf.Graph, what: str, cutting: Cutting) -> None:
    """Checks that no captured tensor has a row for each example: a part would meet all of them."""
    if cutting.num_parts == 1:
        return
    batch, batch_dim = cutting.part_size * cutting.num_parts, cutting.batch_dim
    for outer, _ in graph.captures:
        shape = outer.shape
        if outer.dtype == tf.resource or shape.rank is None or shape.rank <= batch_dim:
            continue
        # The sizes first: to look for the leaves is to walk over all ancestors.
        if shape[batch_dim] == batch and not all(
            kind in VARIABLES or kind == "Const" for kind in _leaves(outer)
        ):
            raise PipelineError(
                f"{what} uses the tensor {name_of(outer)!r} of shape {shape} without being given "
                f"it; it has a row for each of the {batch} examples of the batch, of which "
                f"{cutting.part} has {cutting.part_size}. Pass it in as an input of the pipeline, "
                "which is cut along the batch"
            )


def check_no_handle(
    operations: Sequence[tf.Operation], captured: Sequence[Captured], what: str, device: str
) -> None:
    """Checks that no branch, loop or function reads a variable, which may be on another device."""
    handles = {
        weight.handle: weight
        for weight in captured
        if weight.handle is not None and is_differentiable(weight.outer)
    }
    for operation in operations:
        for tensor in operation.inputs:
            # `redirect` lets these use the value.
            is_read = operation.type in _READS and not (
                operation.type == "ResourceGather" and operation.get_attr("batch_dims")
            )
            if tensor.name in handles and not is_read:
                raise PipelineError(
                    f"{what} has replicas and reads the variable of shape "
                    f"{handles[tensor.name].outer.shape} in {operation.name!r} "
                    f"({operation.type}), a branch, a loop or a function, which {device} cannot "
                    "reach from there; read it before that, as tf.convert_to_tensor(variable), or "
                    "give the stage one device"
                )


def check_fresh(what: str, graph: tf.Graph) -> None:
    """Checks that a function holds no eager tensor, whose value would be old in later calls."""
    for tensor, _ in graph.captures:
        if tensor.dtype not in (tf.resource, tf.variant):
            raise PipelineError(
                f"{what}: a layer uses an eager tensor of shape {tensor.shape} that it was not "
                "given, and would use its present value in later steps as well; pass it in as an "
                "input, make it a tf.Variable or a NumPy array, or call the pipeline inside of a "
                "tf.function"
            )


def is_constant(tensor: tf.Tensor) -> bool:
    """Returns True if a tensor is computed from constants alone, so that it needs no gradient."""
    return all(kind in WITHOUT_GRADIENT for kind in _leaves(tensor))


def is_stopped(tensor: tf.Tensor) -> bool:
    """Returns True if a tensor is computed from `tf.stop_gradient` and constants alone."""
    has_stop = False
    for kind in _leaves(tensor):
        if kind not in WITHOUT_GRADIENT:
            return False
        has_stop |= kind == "StopGradient"
    return has_stop


def _leaves(tensor: tf.Tensor) -> Iterator[str]:
    """Returns the types of the operations without inputs that a tensor is computed from."""
    seen: set[int] = set()
    todo = [tensor]
    while todo:
        current = todo.pop()
        if not hasattr(current, "graph"):
            # An eager tensor: its source is unknown.
            yield "EagerTensor"
            continue
        op = current.op
        if id(op) in seen:
            continue
        seen.add(id(op))
        if op.type == "StopGradient":
            yield op.type
        elif op.inputs:
            todo.extend(op.inputs)
        else:
            captures = getattr(op.graph, "captures", ())
            outer = next((outer for outer, inner in captures if inner is current), None)
            if outer is None:
                yield op.type
            elif outer.dtype == tf.resource:
                yield "VarHandleOp"
            else:
                todo.append(outer)


def name_of(tensor: tf.Tensor, variables: Mapping[int, str] | None = None) -> str:
    """Returns a name for a captured tensor; eager tensors have no name."""
    known = (variables or {}).get(id(tensor))
    return known or (tensor.name if hasattr(tensor, "graph") else "an eager tensor")


def redirect(nodes: Sequence[tf.compat.v1.NodeDef], captured: Sequence[Captured]) -> None:
    """Makes the nodes of a graph read each captured variable through one tensor, in place."""
    same = {read: weight.name for weight in captured for read in weight.reads}
    tables = {weight.handle: weight for weight in captured if weight.handle is not None}
    dtypes = {weight.name: weight.outer.dtype.as_datatype_enum for weight in captured}
    for node in nodes:
        if node.op in _LOOKUPS and tensor_name(node.input[0]) in tables:
            if node.attr["batch_dims"].i == 0:
                # The variable may be elsewhere.
                node.op, node.input[0] = _LOOKUPS[node.op], tables[tensor_name(node.input[0])].name
                node.attr["Tparams"].type = node.attr["dtype"].type
                for name in ("dtype", "batch_dims"):
                    node.attr.pop(name, None)
        elif node.op == "VariableShape" and tensor_name(node.input[0]) in tables:
            node.op, node.input[0] = "Shape", tables[tensor_name(node.input[0])].name
            node.attr["T"].type = dtypes[node.input[0]]
        for number, source in enumerate(node.input):
            if not source.startswith("^") and tensor_name(source) in same:
                node.input[number] = same[tensor_name(source)]
