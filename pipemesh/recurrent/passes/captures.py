"""What a traced function uses besides its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operation_kinds import VARIABLES, WITHOUT_GRADIENT
from pipemesh.backend.static_shape import dtype_behind
from pipemesh.backend.structure import is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.graph_cut import tensor_name

_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"))
# What looks up rows of a variable, and of a tensor.
_LOOKUPS = {"ResourceGather": "Gather", "ResourceGatherNd": "GatherNd"}


@dataclasses.dataclass(frozen=True)
class Captured:
    """A weight, or other numbers, that a stage reaches otherwise than through its theta.

    Attributes:
        outer: its value outside, which gradients flow to.
        name: of the tensor that stands for the value in the graph.
        source: what the graph is differentiated by: that tensor, or the handle of a variable.
        reads: names of other tensors of the graph that are the same.
        handle: name of the variable's handle in the graph; None if a tensor was captured.
    """

    outer: tf.Tensor
    name: str
    source: tf.Tensor
    reads: tuple[str, ...]
    handle: str | None


def captured_weights(graph: tf.Graph) -> list[Captured]:
    """The tensors and variables of numbers that a traced function has captured.

    Constants are none of them: they have no gradient to lose, and need no copies. To be called
    while the graph that surrounds the function is built.

    Args:
        graph: of the function; it gets an operation for each captured variable.
    """
    found = []
    for outer, inner in list(graph.captures):
        if outer.dtype == tf.resource:
            weight = _variable(graph, outer, inner)
            if weight is not None:
                found.append(weight)
        elif _is_number(outer.dtype) and not is_constant(outer):
            # A TF1 variable that is no resource is read here, once.
            value = tf.identity(outer) if _is_ref(outer) else outer
            found.append(Captured(value, inner.name, inner, (), None))
    return found


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
    # The variable may lie elsewhere; where it is used is the stage's device.
    with tf.device(None):
        read = tf.raw_ops.ReadVariableOp(resource=outer, dtype=dtype)
    # Where there is no gradient, there is none of the handle, either.
    source = inner if is_differentiable(value) else value
    return Captured(read, value.name, source, tuple(reads), inner.name)


def _is_number(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool


def _is_ref(tensor: tf.Tensor) -> bool:
    return tensor.dtype != tensor.dtype.base_dtype


def check_batch(
    graph: tf.Graph, what: str, batch_dim: int, part_size: int, num_parts: int, part: str
) -> None:
    """Checks that no tensor with a row for each example of the whole batch is captured.

    A part of the batch would meet all of its rows: an error in the best case, in the worst one
    every row is paired with every other.

    Args:
        graph: of the function.
        what: names it in errors.
        batch_dim: of the pipeline.
        part_size: the examples of a part of the batch.
        num_parts: the number of parts.
        part: what to call one of them.

    Raises:
        PipelineError: there is one.
    """
    if num_parts == 1:
        return
    batch = part_size * num_parts
    for outer, _ in graph.captures:
        shape = outer.shape
        if outer.dtype == tf.resource or shape.rank is None or shape.rank <= batch_dim:
            continue
        if shape[batch_dim] == batch and not _depends_on_weights_alone(outer):
            raise PipelineError(
                f"{what} uses the tensor {name_of(outer)!r} of shape {shape} without being given "
                f"it; it has a row for each of the {batch} examples of the batch, of which "
                f"{part} has {part_size}. Pass it in as an input of the pipeline, "
                "which is cut along the batch"
            )


def check_no_handle(
    operations: Sequence[tf.Operation], captured: Sequence[Captured], what: str, device: str
) -> None:
    """Checks that no branch, loop or function reads a variable, which may lie on another device.

    Args:
        operations: that lie on a certain device.
        captured: what the stage has captured.
        what: names the stage in errors.
        device: the device.

    Raises:
        PipelineError: one does.
    """
    handles = {
        weight.handle: weight
        for weight in captured
        if weight.handle is not None and is_differentiable(weight.outer)
    }
    for operation in operations:
        for tensor in operation.inputs:
            if tensor.name in handles and not _is_read(operation):
                raise PipelineError(
                    f"{what} has replicas and reads the variable of shape "
                    f"{handles[tensor.name].outer.shape} in {operation.name!r} "
                    f"({operation.type}), a branch, a loop or a function, which {device} cannot "
                    "reach from there; read it before that, as tf.convert_to_tensor(variable), or "
                    "give the stage one device"
                )


def _is_read(operation: tf.Operation) -> bool:
    """Whether `redirect` lets an operation use the value of a variable."""
    if operation.type == "ResourceGather" and operation.get_attr("batch_dims"):
        return False
    return operation.type in _READS


def check_fresh(what: str, graph: tf.Graph) -> None:
    """Checks that a function, which eager calls use again and again, holds no eager tensor.

    Args:
        what: names it in errors.
        graph: of the function, while it is traced: what it computes is in it.

    Raises:
        PipelineError: it does: a later call would find the value of the first one.
    """
    for tensor, _ in graph.captures:
        if tensor.dtype not in (tf.resource, tf.variant):
            raise PipelineError(
                f"{what}: a layer uses an eager tensor of shape {tensor.shape} that it was not "
                "given, and would use its present value in later steps as well; pass it in as an "
                "input, make it a tf.Variable or a NumPy array, or call the pipeline inside of a "
                "tf.function"
            )


def is_constant(tensor: tf.Tensor) -> bool:
    """Whether a tensor was computed from constants alone, so that nothing has its gradient."""
    return all(op.type in WITHOUT_GRADIENT for op in _leaves(tensor))


def _depends_on_weights_alone(tensor: tf.Tensor) -> bool:
    return all(op.type in VARIABLES or op.type == "Const" for op in _leaves(tensor))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Stands for the operation of a tensor that has none."""

    type: str


def _leaves(tensor: tf.Tensor) -> Iterator[Any]:
    """The operations without inputs that a tensor is computed from."""
    seen: set[int] = set()
    todo = [tensor]
    while todo:
        current = todo.pop()
        if not hasattr(current, "graph"):
            # An eager tensor: who knows what it was computed from.
            yield _Leaf("EagerTensor")
            continue
        op = current.op
        if id(op) in seen:
            continue
        seen.add(id(op))
        if op.type == "StopGradient":
            yield op
        elif op.inputs:
            todo.extend(op.inputs)
        else:
            captures = getattr(op.graph, "captures", ())
            outer = next((outer for outer, inner in captures if inner is current), None)
            if outer is None:
                yield op
            elif outer.dtype == tf.resource:
                yield _Leaf("VarHandleOp")
            else:
                todo.append(outer)


def name_of(tensor: tf.Tensor, variables: Mapping[int, str] | None = None) -> str:
    """A name for a captured tensor; eager ones have none of their own."""
    known = (variables or {}).get(id(tensor))
    return known or (tensor.name if hasattr(tensor, "graph") else "an eager tensor")


def redirect(nodes: Sequence[tf.compat.v1.NodeDef], captured: Sequence[Captured]) -> None:
    """Makes the nodes of a graph read each captured variable through one tensor.

    Args:
        nodes: changed in place.
        captured: what the graph has captured.
    """
    same = {read: weight.name for weight in captured for read in weight.reads}
    tables = {weight.handle: weight for weight in captured if weight.handle is not None}
    dtypes = {weight.name: weight.outer.dtype.as_datatype_enum for weight in captured}
    for node in nodes:
        if node.op in _LOOKUPS and tensor_name(node.input[0]) in tables:
            if node.attr["batch_dims"].i == 0:
                _as_lookup(node, tables[tensor_name(node.input[0])].name)
        elif node.op == "VariableShape" and tensor_name(node.input[0]) in tables:
            node.op, node.input[0] = "Shape", tables[tensor_name(node.input[0])].name
            node.attr["T"].type = dtypes[node.input[0]]
        for number, source in enumerate(node.input):
            if not source.startswith("^") and tensor_name(source) in same:
                node.input[number] = same[tensor_name(source)]


def _as_lookup(node: tf.compat.v1.NodeDef, table: str) -> None:
    """Looks up rows of a tensor instead of those of a variable, which may lie elsewhere."""
    node.op = _LOOKUPS[node.op]
    node.input[0] = table
    node.attr["Tparams"].type = node.attr["dtype"].type
    for name in ("dtype", "batch_dims"):
        node.attr.pop(name, None)
