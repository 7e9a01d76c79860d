"""Prices of layout rules for a program on named dims, counted without devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operation_kinds import IDENTITIES, RESHAPES
from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import as_shape
from pipemesh.lowering.costs import OperationCosts
from pipemesh.lowering.differentiate import gradients
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.registry import OPS
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Mesh, Price, Pricing, Shape
from pipemesh.mesh.find_layout import Axes
from pipemesh.plan.machine import Machine, by_work, least_seconds
from pipemesh.text import nearest_text

# Operations in whose tensors all dims meet.
_MEETING = ("einsum", "elementwise", "reduction", "softmax")


class _OneProcessor(SimdLowering):
    """The program of one processor that communicates with nobody: shapes are right, values not."""

    def __init__(self, mesh: Mesh, rules: LayoutRules) -> None:
        super().__init__(mesh, rules, tf.compat.v1.placeholder(tf.int32, []))

    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Returns the values themselves."""
        del axes, op
        return (tf.identity(x[0]),)

    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Repeats the slice."""
        return (tf.concat([x[0]] * self.mesh.size(axis), dim),)

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Repeats the first piece."""
        pieces = tf.split(x[0], self.mesh.size(axis), split_dim)
        return (tf.concat([pieces[0]] * len(pieces), concat_dim),)

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Returns the values themselves."""
        del axis, pairs
        return (tf.identity(x[0]),)


def program_pricing(
    mesh: Mesh,
    program: Callable[..., Tensor],
    shapes: Mapping[str, Shape | str],
    machine: Machine,
    *,
    trained: Collection[str] = (),
    optimizer: float = 2.0,
    dtypes: Mapping[str, Any] | None = None,
) -> Pricing:
    """Describes a program for `pipemesh.mesh.find_layout`, which searches its layout rules.

    For each layout the program of one processor is traced, in a graph that never runs, so the mesh
    needs no devices. Seconds are those of `Machine`. Memory is that of the inputs, of gradients and
    of the optimizer's state, and of what the forward pass keeps for the backward pass.

    Args:
        mesh: the mesh.
        program: takes a tensor for each of `shapes` and returns the loss. Without `trained` it may
            return any tensor.
        shapes: of the inputs, by name, in the order of the program's arguments.
        machine: the speed of a device and its links.
        trained: the names of the inputs that get a gradient, such as weights.
        optimizer: bytes of the optimizer's state for each byte of a trained input.
        dtypes: of inputs that are not float32.

    Raises:
        ShapeError: `trained` or `dtypes` names no input, or the program cannot be traced.

    Example:
        >>> from pipemesh.lowering import ops
        >>> from pipemesh.mesh import find_layout
        >>> from pipemesh.plan import Link
        >>> shapes = {"x": "batch:512;io:64", "w": "io:64;hidden:32", "v": "hidden:32;io:64"}
        >>> def loss(x, w, v):
        ...     hidden = ops.relu(ops.einsum([x, w], "batch;hidden"))
        ...     return ops.reduce_mean(ops.square(ops.einsum([hidden, v], "batch;io") - x))
        >>> machine = Machine(flops=1e9, network=Link(1e-6, 1e9))
        >>> pricing = program_pricing(
        ...     Mesh.from_text("all:4"), loss, shapes, machine, trained=["w", "v"])
        >>> found = find_layout(pricing)
        >>> str(found.rules), found.is_best
        ('batch:all', True)
    """
    dtypes = dtypes or {}
    for name in (*trained, *dtypes):
        if name not in shapes:
            raise ShapeError(f"the program has no input {name!r}{nearest_text(name, shapes)}")
    named = {name: as_shape(shape, name) for name, shape in shapes.items()}

    def traced(
        mesh: Mesh, rules: LayoutRules, costs: OperationCosts | None = None
    ) -> tuple[_OneProcessor, int]:
        """Returns the lowering of a traced step, and the bytes that a processor holds."""
        with tf.Graph().as_default() as graph:
            lowering = _OneProcessor(mesh, rules)
            lowering.costs = costs or lowering.costs
            inputs: dict[str, Tensor] = {}
            for name, shape in named.items():
                sizes = lowering.tensor_layout(shape).slice_shape
                given = tf.compat.v1.placeholder(dtypes.get(name, tf.float32), sizes)
                inputs[name] = Tensor(lowering, (given,), shape)
            weights: Any = [inputs[name] for name in trained]
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = program(*inputs.values())
            held = num_bytes(x.slices[0] for x in inputs.values())
            held += int((1 + optimizer) * num_bytes(x.slices[0] for x in weights))
            if weights:
                number = len(graph.get_operations())
                gradients(loss, weights, tape)
                held += _kept(graph.get_operations(), number)
        return lowering, held

    found, _ = traced(Mesh(()), LayoutRules())
    dims = found.dims
    # Of the program that nothing splits: rules, even over axes of size 1, add work to some
    # operations, so that a bound from it would be too high.
    whole = OperationCosts(Mesh(tuple((dim, 1) for dim in dims)), by_dims=True)
    traced(Mesh(()), LayoutRules(), whole)
    least = least_seconds(whole.work, mesh, machine)

    def price(rules: LayoutRules) -> Price:
        lowering, held = traced(mesh, rules)
        parts = machine.parts(lowering.costs, mesh)
        return Price(sum(parts.values()), held, parts)

    def least_price(decided: Axes) -> Price:
        return Price(least(decided))

    sizes = {dim: dims[dim] for dim in by_work(whole.work, dims)}
    return Pricing(mesh, sizes, price, least_price, _meeting(whole))


def _meeting(costs: OperationCosts) -> set[frozenset[str]]:
    return {
        frozenset(dims)
        for dims, operation, _ in costs.work
        if operation in OPS and OPS[operation].group in _MEETING
    }


def _kept(operations: Sequence[tf.Operation], number: int) -> int:
    """Returns the bytes of results of the first operations that later ones read."""
    forward = set(operations[:number])
    kept: dict[Any, int] = {}
    for operation in operations[number:]:
        for tensor in operation.inputs:
            while tensor.op.type in IDENTITIES | RESHAPES:
                tensor = tensor.op.inputs[tensor.value_index]
            # Shapes and constants are no values.
            is_value = tensor.op in forward and tensor.op.type not in ("Placeholder", "Const")
            if is_value and tensor.shape.is_fully_defined():
                kept[tensor.ref()] = num_bytes([tensor])
    return sum(kept.values())
