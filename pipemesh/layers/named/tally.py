"""Costs of layers with named dims, counted from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PartitionError
from pipemesh.lowering.arguments import dim_names
from pipemesh.lowering.costs import FORWARD, OperationCosts, Work
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.ops.convolution import (
    Kept,
    convolution_flops,
    enlarged,
    reaches_of,
    windows_of,
)
from pipemesh.lowering.ops.einsum import product_flops
from pipemesh.lowering.ops.pooling import pooling_flops
from pipemesh.lowering.ops.relayout import (
    NO_NAMES,
    change_splits,
    gather_to_meet,
    renamed_shape,
    sum_to_splits,
)
from pipemesh.lowering.ops.rows import Windows, rows_sent
from pipemesh.mesh import Dim, Shape

# The operations whose flops decide where stages are cut.
PRODUCTS = ("einsum", "attention", "conv1d", "conv2d", "conv3d", "conv_transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A tensor with a shape but no elements; two are never equal."""

    shape: Shape
    dtype: tf.DType
    differs: bool = True  # depends on the inputs, as weights do not
    has_gradient: bool = True


class Tally:
    """A counter that follows a layer's `FProp`; it computes nothing and builds no graph.

    Each method counts the operation of its name: its work, its communication forward and
    backward, and the tensors that its gradient reads. `keep` adds tensors that the gradient of
    another operation reads. A tensor that several gradients read counts once. The work of products
    is that of `lowering.costs`; that of element-wise operations is roughly counted where tensors
    meet.

    Attributes:
        lowering: its mesh and rules define the splits.
        counting: a lowering whose primitives count what they send, forward and backward.
        parameter_bytes: bytes of weights, with each slice counted once.
        held_bytes: those that one processor of a replica holds.
        dims: the dims of inputs and weights, each with the sizes that an axis has to divide.
        weight_dims: those of weights.
        fetched_bytes: bytes of weights cut over replicas that one replica gets from others.
        activation_bytes: bytes kept for the backward pass, on all processors together.
        costs: the traffic and the work of one processor.

    Example:
        >>> from pipemesh.layers.named import current_lowering
        >>> tally = Tally(current_lowering())
        >>> x = tally.given([2, 3, 4], "batch;length;embed", tf.float32)
        >>> w = tally.weight("embed:4;d_ff:8", tf.float32)
        >>> y = tally.einsum([x, w], "batch;length;d_ff")
        >>> str(y.shape), tally.flops, tally.activation_bytes
        ('batch:2;length:3;d_ff:8', 384, 96)
    """

    def __init__(self, lowering: Lowering) -> None:
        self.parameter_bytes = self.fetched_bytes = self.activation_bytes = 0
        self.held_bytes = 0
        self.dims: dict[str, set[int]] = {}
        self.weight_dims: set[str] = set()
        self.lowering = lowering
        self.counting = _Counting(lowering.mesh, lowering.rules)
        given = lowering.costs
        self.costs = self.counting.costs = OperationCosts(given.mesh, by_dims=given.by_dims)
        self._rules = lowering.rules
        self._mesh = lowering.mesh
        self._kept: dict[Value, int] = {}

    @property
    def flops(self) -> int:
        """Returns the flops of products in the forward pass, each computed once in all."""
        return sum(
            flops * math.prod(map(self.costs.mesh.size, axes))
            for (axes, operation, direction), (_, flops, _) in self.costs.work.items()
            if operation in PRODUCTS and direction == FORWARD
        )

    @property
    def communication_bytes(self) -> int:
        """Returns the bytes that all processors send, in both passes together."""
        return self._mesh.num_devices * self.costs.total_bytes

    def given(self, x: Any, dims: str | Sequence[str], dtype: tf.DType) -> Value:
        """Returns an input as a value, given its sizes, such as a `tshape.Shape`, or a value.

        Integers have no gradient.

        Raises:
            PartitionError: the number of sizes is wrong, or a size is unknown.
            LayoutError: the rules cannot split it.
        """
        names = dim_names(dims)
        if isinstance(x, Value):
            return x if x.shape.names == names else self.made(x.shape.select(*names), x)
        text = ";".join(names)
        try:
            sizes = [int(size) for size in x]
        except TypeError as error:
            raise PartitionError(f"the shape of '{text}' is {x}; every size has to be known") from (
                error
            )
        if len(sizes) != len(names):
            raise PartitionError(f"the shape {x} was given for the dims '{text}'; give one of each")
        shape = Shape(tuple(map(Dim, names, sizes)))
        # Raises if the rules cannot split it.
        self._rules.tensor_layout(shape, self._mesh)
        self.note_dims(shape)
        return Value(shape, dtype, has_gradient=dtype.is_floating)

    def note_dims(self, shape: Shape, but: Collection[str] = ()) -> None:
        """Notes dims that rules may split, `but` some of any size, which are padded."""
        for dim in shape:
            self.dims.setdefault(dim.name, set()).update(() if dim.name in but else (dim.size,))

    def weight(self, shape: Any, dtype: tf.DType) -> Value:
        """Returns a weight as a value; the layer that has it counts its bytes."""
        return Value(Shape.from_text(shape) if isinstance(shape, str) else shape, dtype, False)

    def made(
        self, dims: Shape | str | Sequence[str], like: Value, dtype: tf.DType | None = None
    ) -> Value:
        """Returns a new value that is computed from another one, without communication.

        `dims` is its shape, or names of dims of the other value. Integers and booleans have no
        gradient.
        """
        shape = dims if isinstance(dims, Shape) else like.shape.select(*dim_names(dims))
        dtype = dtype or like.dtype
        has_gradient = like.has_gradient and dtype.is_floating
        return Value(shape, dtype, like.differs, has_gradient)

    def keep(self, *values: Value, axes: Sequence[str] | None = None) -> None:
        """Counts tensors that a gradient reads.

        Pass `axes` if only the gradient of a weight reads them. These are the axes along which that
        gradient differs, since copies of it are not computed. By default it differs on each
        processor.
        """
        number = self._mesh.num_devices
        if axes is not None:
            number = math.prod(self._mesh.size(axis) for axis in set(axes))
        for value in values:
            if value.differs and self._kept.get(value, 0) < number:
                more = number - self._kept.get(value, 0)
                self._kept[value] = number
                self.activation_bytes += more * num_bytes(self.slices(value))

    def work(
        self, operation: str, operands: Sequence[Value], result: Value, flops: int | None = None
    ) -> None:
        """Counts an operation; by default, one flop for each element of its largest tensor."""
        tensors = [self.slices(value)[0] for value in (*operands, result)]
        if flops is None:
            flops = max(math.prod(tensor.shape.as_list()) for tensor in tensors)
        gradients = sum(value.has_gradient for value in operands) if result.has_gradient else 0
        layouts = [self._rules.tensor_layout(value.shape, self._mesh) for value in operands]
        axes = [axis for layout in layouts for axis in self.costs.dividing(layout)]
        self.costs.add_work(operation, axes, Work(flops, num_bytes(tensors), gradients))

    def elementwise(self, *values: Value) -> tuple[str, ...]:
        """Counts an operation on the elements of operands that `meet`, and returns their axes."""
        largest = max(values, key=lambda value: value.shape.size)
        self.work("elementwise", values, largest)
        return self.meet(*values)

    def meet(self, *values: Value) -> tuple[str, ...]:
        """Counts the communication of operands that meet on each processor, and returns their axes.

        Operands that are equal along axes become varying there.
        """
        axes = tuple(dict.fromkeys(axis for value in values for axis in self._axes(value)))
        for value in values:
            self.vary(value, axes)
        return axes

    def vary(self, x: Value, axes: Sequence[str]) -> None:
        """Counts the sum of the gradient of a value that is equal along axes."""
        own = self._axes(x)
        self.counting.vary(self.slices(x), [axis for axis in axes if axis not in own])

    def all_reduce(self, x: Value, axes: Sequence[str]) -> None:
        """Counts an all-reduce along axes."""
        self.counting.all_reduce(self.slices(x), axes)

    def reduce(self, x: Value, dims: str | Sequence[str], times: int = 1) -> Value:
        """Counts a reduction over dims, `times` times; keeps nothing."""
        stay = self.made(x.shape.without(*dim_names(dims)), x)
        self.work("reduce", [x], stay)
        axes = [axis for axis in self._axes(x) if axis not in self._axes(stay)]
        for _ in range(times):
            self.all_reduce(stay, axes)
        return stay

    def einsum(
        self,
        operands: Sequence[Value],
        dims: str | Sequence[str],
        met: bool = False,
        names: Mapping[str, str] = NO_NAMES,
    ) -> Value:
        """Counts a matmul of two operands, each read by the other's gradient.

        `met` says that the first operand already varies. `names` maps dims of the result to new
        names.
        """
        first, second = operands
        union = first.shape | second.shape
        layout = self._rules.tensor_layout(union, self._mesh)
        if met:
            axes = tuple(dict.fromkeys((*self._axes(first), *self._axes(second))))
            self.vary(second, axes)
        else:
            axes = self.meet(first, second)
        for one, other in ((first, second), (second, first)):
            self.keep(one, axes=None if other.differs else axes)
        result = Value(union.select(*dim_names(dims)), first.dtype)
        self.work("einsum", operands, result, product_flops(layout.slice_shape))
        summed = [axis for axis in axes if axis not in self._axes(result)]
        return self._summed(result, summed, names)

    def _summed(self, x: Value, axes: Sequence[str], names: Mapping[str, str]) -> Value:
        """Counts a sum over axes under new names, as `relayout.summed` does."""
        result = Value(renamed_shape(x.shape, names), x.dtype)
        old, new = (self._rules.tensor_layout(v.shape, self._mesh).axes for v in (x, result))
        sum_to_splits(self.counting, self.slices(x), axes, old, new)
        return result

    def products(
        self,
        x: Value,
        weights: Sequence[Value],
        dims: Sequence[str | Sequence[str]],
        names: Mapping[str, str] = NO_NAMES,
    ) -> list[Value]:
        """Counts matmuls that share one operand, as in `pipemesh.lowering.ops.einsum.products`."""
        gathered: Sequence[str] = ()
        if names:
            shape = renamed_shape(x.shape, names)
            met = set.intersection(*(set(self._axes(weight)) for weight in weights))
            old, new = (self._rules.tensor_layout(s, self._mesh).axes for s in (x.shape, shape))
            _, gathered = gather_to_meet(self.counting, self.slices(x), old, new, met)
            x = self.made(shape, x)
        own = (*self._axes(x), *gathered)
        lacking = [
            tuple(axis for axis in self._axes(weight) if axis not in own) for weight in weights
        ]
        for axes in dict.fromkeys(lacking):
            self.vary(x, axes)
        return [
            self.einsum([x, weight], result, met=True)
            for weight, result in zip(weights, dims, strict=True)
        ]

    def gather(
        self, table: Value, indices: Value, dim: str, names: Mapping[str, str] = NO_NAMES
    ) -> Value:
        """Counts a lookup in a table; its gradient reads the indices and whether they are local."""
        self._rules.tensor_layout(table.shape | indices.shape, self._mesh)
        axes = tuple(dict.fromkeys((*self._axes(table), *self._axes(indices))))
        self.vary(table, axes)
        found = (self.made(indices.shape, indices, dtype) for dtype in (None, tf.bool))
        self.keep(*found, axes=None if table.differs else axes)
        shared = [name for name in indices.shape.names if name in table.shape.names]
        own = table.shape.without(dim, *shared)
        found = Value(Shape((*indices.shape.dims, *own.dims)), table.dtype)
        self.work("gather", [table, indices], found, 0)
        axis = self._rules.axis(dim)
        return self._summed(found, [axis] if axis else [], names)

    def convolution(
        self,
        x: Value,
        filters: Value,
        window: Mapping[str, str],
        padding: str,
        strides: Mapping[str, int],
        transposed: bool = False,
    ) -> Value:
        """Counts a convolution with weights, as `pipemesh.lowering.ops.conv2d`, or its transpose.

        Its gradient reads the rows under the windows, including zeros and rows of neighbours.
        """
        kernel = filters.shape.select(*window.values())
        rest = filters.shape.without(*kernel.names)
        shared, out = x.shape & rest, rest - x.shape
        shape = Shape((*x.shape.without(*shared.names).dims, *out.dims))
        reaches = reaches_of(filters.shape, window, dict.fromkeys(window, 1))
        given = (reaches, padding, strides, self._rules, self._mesh)
        kept: Mapping[str, Kept] = {}
        if transposed:
            shape, runs, kept = enlarged(x.shape, shape, *given)
        else:
            shape, runs = windows_of(x.shape, shape, *given)
        self._rules.tensor_layout(x.shape | shape.without(*runs), self._mesh)
        axes = self.meet(x, filters)
        rows = self._under_windows(x, runs)
        self.keep(rows, axes=axes)
        result = Value(shape, x.dtype)
        met, channels = (rows, out) if transposed else (result, shared)
        channels = self._rules.tensor_layout(channels, self._mesh).slice_shape
        flops = convolution_flops(kernel, math.prod(channels), math.prod(self.slice_sizes(met)))
        name = "conv_transpose" if transposed else f"conv{len(window)}d"
        self.work(name, [rows, filters], result, flops)
        self.all_reduce(result, [axis for axis in axes if axis not in self._axes(result)])
        for name, part in kept.items():
            share = self.slice_sizes(result)[shape.index(name)]
            if part.length != share:
                parts = shape[name].size // max(share, 1)
                moved = Windows(part.length * parts, 0, share, share)
                self._under_windows(self._with_rows(result, name, moved.size), {name: moved})
        return result

    def pooling(
        self,
        x: Value,
        window: Mapping[str, int],
        padding: str,
        strides: Mapping[str, int],
        greatest: bool,
    ) -> Value:
        """Counts `pipemesh.lowering.ops.max_pool` or `avg_pool`."""
        for name in sorted(window, key=x.shape.index, reverse=True):
            size = window[name]
            given = ({name: size}, padding, strides, self._rules, self._mesh)
            shape, runs = windows_of(x.shape, x.shape, *given)
            rows = self._under_windows(x, runs)
            if greatest and padding == "SAME":
                inside = Shape((Dim(name, rows.shape[name].size),))
                self.keep(self.made(inside, rows, tf.bool))
            x = self.made(shape, x)
            flops = pooling_flops(size, self.slice_sizes(x))
            self.work("max_pool" if greatest else "avg_pool", [rows], x, flops)
            if greatest and size > 1:
                # The greater of each two is chosen: of all rows of a window, one after the other.
                self.keep(*(self.made(shape, x) for _ in range(2 * size - 2)))
        return x

    def _under_windows(self, x: Value, runs: Mapping[str, Windows]) -> Value:
        """Counts what `take_windows` sends for the windows of some dims, and returns the rows."""
        for name, of in runs.items():
            axis, own = self._rules.axis(name), x.shape[name].size
            parts = self._mesh.size(axis) if axis else 1
            for number in rows_sent(of, parts):
                sent = self.slices(self._with_rows(x, name, number * parts))
                self.counting.permute(sent, str(axis), ())
            if of.start or of.length * parts != own:
                x = self._with_rows(x, name, of.length * parts)
        return x

    def _with_rows(self, x: Value, name: str, number: int) -> Value:
        return self.made(x.shape.replace(name, Dim(name, number)), x)

    def rename(self, x: Value, names: Mapping[str, str]) -> Value:
        """Renames dims, which may move splits."""
        shape = renamed_shape(x.shape, names)
        if shape == x.shape:
            return x
        renamed = self.made(shape, x)
        old, new = (self._rules.tensor_layout(s, self._mesh).axes for s in (x.shape, shape))
        moved = change_splits(self.counting, self.slices(x), old, new)
        assert moved == self.slices(renamed)
        return renamed

    def _axes(self, x: Value) -> tuple[str, ...]:
        return self._rules.tensor_layout(x.shape, self._mesh).split_axes

    def slice_sizes(self, x: Value) -> tuple[int, ...]:
        """Returns the sizes of one processor's slice."""
        return self._rules.tensor_layout(x.shape, self._mesh).slice_shape

    def slices(self, x: Value) -> Any:
        """Returns a slice of a value, of one processor, for primitives of `counting`."""
        return (_Slice(tf.TensorShape(self.slice_sizes(x)), x.dtype, x.has_gradient),)

    def slice_of(self, sizes: Sequence[int], dtype: tf.DType) -> Any:
        """Returns a slice of these sizes, as `slices`; integers have no gradient."""
        return (_Slice(tf.TensorShape(list(sizes)), dtype, dtype.is_floating),)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A slice of a value."""

    shape: tf.TensorShape
    dtype: tf.DType
    has_gradient: bool


class _Counting(Lowering):
    """A lowering of slices without elements: primitives, and their gradients, are only counted."""

    def _nothing(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a tally computes nothing")

    num_slices = 1
    import_tensor = export_tensor = map_to_several = raw_map = coordinate = _nothing

    def with_gradient(self, forward: Any, backward: Any, *operands: Any) -> Any:
        """Counts both passes; there is no second derivative."""
        results = forward(*operands)
        if operands[0][0].has_gradient and not self._is_backward:
            backward(results)
        return results

    def _same(self, x: Any, *_: Any, **__: Any) -> Any:
        return x

    raw_all_reduce = raw_permute = _same

    def raw_all_gather(self, x: Any, axis: str, dim: int) -> Any:
        """Returns larger slices."""
        return self._resized(x, dim, x[0].shape[dim] * self.mesh.size(axis))

    def raw_reduce_scatter(self, x: Any, axis: str, dim: int) -> Any:
        """Returns smaller slices."""
        return self._resized(x, dim, x[0].shape[dim] // self.mesh.size(axis))

    raw_slice = raw_reduce_scatter

    def raw_all_to_all(self, x: Any, axis: str, split_dim: int, concat_dim: int) -> Any:
        """Returns slices with one larger and one smaller dim."""
        return self.raw_all_gather(self.raw_slice(x, axis, split_dim), axis, concat_dim)

    def _resized(self, x: Any, dim: int, size: int) -> Any:
        sizes = x[0].shape.as_list()
        sizes[dim] = size
        return (dataclasses.replace(x[0], shape=tf.TensorShape(sizes)),)
