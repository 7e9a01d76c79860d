"""Computes a function of whole tensors on slices: it is traced, and each operation gets a split."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import string
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend.graphs import (
    called_definitions,
    copied_operation,
    gradient_owner,
    needed_operations,
)
from pipemesh.backend.operation_kinds import DRAWS_WITH_STATE, EFFECTS
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.ops.lookup import gather
from pipemesh.lowering.ops.relayout import Axes, change_splits, leading_dims
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Shape, TensorLayout

# The function is written for whole tensors. Its graph is walked once to find for each tensor the
# axes that split its dims: an operation keeps the splits of its inputs where its result on slices
# is a slice of its result, sums over a split dim end in an all-reduce, and all other operations
# get whole inputs (Xu et al., "GSPMD", 2021, section 3.5). Then the operations between two
# communications are computed by one `Lowering.map`, whose gradient is theirs.


@dataclasses.dataclass(eq=False)
class _Value:
    """A tensor of the program: the axis of each dim, and the whole sizes."""

    axes: tuple[str | None, ...]
    sizes: tuple[int, ...]
    dtype: tf.DType
    # How many communications come before it, one behind the other.
    level: int
    has_gradient: bool
    # Its array, if that is known.
    constant: Any = None
    slices: Slices | None = None

    @property
    def split_axes(self) -> list[str]:
        return [axis for axis in self.axes if axis is not None]


@dataclasses.dataclass
class _Step:
    """Local operations, or with `communicates` a function of the slices of all processors."""

    run: Callable[..., Any]
    inputs: list[_Value]
    outputs: list[_Value]
    communicates: bool = False


class SplitGraph:
    """A function of whole tensors, as a program on slices under a lowering.

    Operations that need whole tensors get them; the layers in whose name scopes they are, if that
    joins a split tensor, are `gathering`, by name with the kinds of operations.
    """

    def __init__(self, lowering: Lowering, name: str) -> None:
        self._lowering = lowering
        self._name = name
        self._values: dict[str, _Value] = {}
        self._steps: list[_Step] = []
        self._made: dict[Any, _Value] = {}
        self.gathering: dict[str, set[str]] = {}

    def run(
        self,
        function: Callable[..., Any],
        operands: Sequence[Tensor],
        shape_of: Callable[[Sequence[int]], Shape],
    ) -> Any:
        """Calls a function of whole tensors; returns its results, each whole on all processors.

        Results are nested as the function nests its tensors. `shape_of` names the dims of a result,
        for which there are no rules.
        """
        specs = [tf.TensorSpec(x.shape.sizes, x.dtype) for x in operands]
        traced = tf.function(lambda *args: function(*args), autograph=False)
        graph: Any = traced.get_concrete_function(*specs).graph
        results = [t for t in tf.nest.flatten(graph.structured_outputs) if t is not None]
        for operation in graph.get_operations():
            if operation.type in EFFECTS:
                raise PipelineError(
                    f"{self._name}: {operation.name!r} is a {operation.type} operation, which "
                    "checks or prints a tensor that is split; leave it out of the layer, or the "
                    "rules that split it"
                )
            if operation.type in DRAWS_WITH_STATE:
                raise PipelineError(
                    f"{self._name}: {operation.name!r} is a {operation.type} operation, which "
                    "draws other numbers on each device; draw them by a keras.random.SeedGenerator "
                    "of the layer, as keras.layers.Dropout does"
                )
        inner = [captured for _, captured in graph.captures]
        arguments = [t for t in graph.inputs if not any(t is captured for captured in inner)]
        for tensor, operand in zip(arguments, operands, strict=True):
            self._values[tensor.name] = self._source(tensor, operand.slices, operand.layout.axes)
        for outer, tensor in graph.captures:
            self._capture(outer, tensor)
        for operation in needed_operations(graph, results):
            if operation.type != "ReadVariableOp":
                self._add(operation)
        outputs = [self._moved(self._value(t), (None,) * t.shape.rank) for t in results]
        self._compute(outputs)
        found = iter(outputs)

        def result(tensor: tf.Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            output = next(found)
            return Tensor(self._lowering, self._slices(output), shape_of(output.sizes))

        return tf.nest.map_structure(result, graph.structured_outputs)

    def _capture(self, outer: tf.Tensor, tensor: tf.Tensor) -> None:
        """Gives each processor a tensor that the function uses, or the value of a variable."""
        if tensor.dtype != tf.resource:
            whole = TensorLayout(_shape(tensor), self._lowering.mesh, (None,) * tensor.shape.rank)
            slices = self._lowering.import_tensor(outer, whole)
            self._values[tensor.name] = self._source(tensor, slices, whole.axes)
            return
        for operation in tensor.consumers():
            read = operation.outputs[0]
            if operation.type != "ReadVariableOp" or read.dtype.is_floating:
                raise PipelineError(
                    f"{self._name}: {operation.name!r} ({operation.type}) uses a variable that is "
                    "none of its weights; make it by add_weight, or leave out the rules that split "
                    "this layer"
                )
            value = tf.raw_ops.ReadVariableOp(resource=outer, dtype=read.dtype)
            self._capture(tf.ensure_shape(value, read.shape), read)

    def _source(self, tensor: tf.Tensor, slices: Slices, axes: Axes) -> _Value:
        sizes = tuple(static_sizes(tensor))
        return _Value(tuple(axes), sizes, tensor.dtype, 0, tensor.dtype.is_floating, slices=slices)

    def _value(self, tensor: tf.Tensor) -> _Value:
        return self._values[tensor.name]

    # Steps.

    def _communicated(
        self, key: Any, run: Callable[..., Slices], inputs: list[_Value], axes: Axes, like: _Value
    ) -> _Value:
        """Adds communication, unless the same is known by its key; the result is like a value."""
        if key not in self._made:
            level = 1 + max(value.level for value in inputs)
            result = dataclasses.replace(
                like, axes=tuple(axes), level=level, constant=None, slices=None
            )
            self._steps.append(_Step(run, inputs, [result], communicates=True))
            self._made[key] = result
        return self._made[key]

    def _moved(self, value: _Value, axes: Sequence[str | None]) -> _Value:
        """Returns a value with other splits."""
        if value.axes == tuple(axes):
            return value
        run = functools.partial(change_splits, self._lowering, old=value.axes, new=tuple(axes))
        return self._communicated(("move", value, tuple(axes)), run, [value], axes, value)

    def _varied(self, value: _Value, axes: Iterable[str]) -> _Value:
        """Returns a value that meets others which differ along axes; its gradient is summed."""
        lacking = tuple(sorted({axis for axis in axes if axis not in value.axes}))
        if not lacking or not value.has_gradient:
            return value
        run = functools.partial(self._lowering.vary, axes=lacking)
        return self._communicated(("vary", value, lacking), run, [value], value.axes, value)

    def _summed(self, value: _Value, axes: Sequence[str]) -> _Value:
        """Returns the sum of partial results over axes."""
        if not axes:
            return value
        run = functools.partial(self._lowering.all_reduce, axes=tuple(axes))
        return self._communicated(("sum", value, tuple(axes)), run, [value], value.axes, value)

    def _local(
        self,
        operation: tf.Operation,
        inputs: Sequence[_Value],
        axes: Sequence[Axes],
        run: Callable[..., Any] | None = None,
    ) -> list[_Value]:
        """Adds an operation on slices, whose outputs have these splits."""
        met = {axis for value in inputs for axis in value.split_axes}
        varied = [self._varied(value, met) for value in inputs]
        level = max((value.level for value in varied), default=0)
        stops = operation.type == "StopGradient" or not any(v.has_gradient for v in varied)
        outputs = [
            _Value(
                tuple(of_one),
                tuple(static_sizes(tensor)),
                tensor.dtype,
                level,
                tensor.dtype.is_floating and not stops,
            )
            for tensor, of_one in zip(operation.outputs, axes, strict=True)
        ]
        run = run or functools.partial(copied_operation, operation)
        self._steps.append(_Step(run, varied, outputs))
        return outputs

    # Splits of operations.

    def _add(self, operation: tf.Operation) -> None:
        """Adds an operation of the traced graph."""
        for tensor in operation.outputs:
            if not tensor.shape.is_fully_defined():
                raise PipelineError(
                    f"{self._name}: {operation.name!r} ({operation.type}) has the shape "
                    f"{tensor.shape}, which is known only when the step runs; give inputs of "
                    "static shapes, or leave out the rules that split this layer"
                )
        constants = [tf.get_static_value(tensor) for tensor in operation.outputs]
        if constants and all(value is not None for value in constants):
            for tensor, value in zip(operation.outputs, constants, strict=True):
                sizes = tuple(static_sizes(tensor))
                known = _Value((None,) * len(sizes), sizes, tensor.dtype, 0, False, value)
                self._values[tensor.name] = known
            return
        inputs = [self._value(tensor) for tensor in operation.inputs]
        calls = next(called_definitions(operation.graph, operation), None) is not None
        if calls and any(value.has_gradient for value in inputs):
            raise PipelineError(
                f"{self._name}: {operation.name!r} ({operation.type}) is a loop, a branch or a "
                "called function, whose gradient is not known on slices; unroll it (in Keras, "
                "unroll=True), or use a layout that splits nothing inside a stage"
            )
        outputs = None
        if any(value.split_axes for value in inputs):
            rule = _RULES.get(operation.type)
            outputs = None if rule is None else rule(self, operation, inputs)
        if outputs is None:
            outputs = self._whole(operation, inputs)
        for tensor, value in zip(operation.outputs, outputs, strict=True):
            self._values[tensor.name] = value

    def _whole(self, operation: tf.Operation, inputs: Sequence[_Value]) -> list[_Value]:
        """Adds an operation that each processor computes of whole tensors."""
        if any(value.split_axes for value in inputs):
            self._note_gather(operation)
        whole = [self._moved(value, (None,) * len(value.axes)) for value in inputs]
        if operation.type == "IdentityN":
            return self._passed_on(operation, whole)
        return self._local(operation, whole, [(None,) * t.shape.rank for t in operation.outputs])

    def _passed_on(self, operation: tf.Operation, inputs: Sequence[_Value]) -> list[_Value]:
        """Returns the inputs of an operation that stands for a custom gradient.

        Some are the gradient of the operations before it, which are differentiated instead.
        """
        owner = gradient_owner(operation)
        if owner is not None and not owner.startswith(_TRUE_GRADIENTS):
            raise PipelineError(
                f"{self._name}: {operation.name!r} has a custom gradient, of {owner}, which knows "
                "whole tensors alone; leave it out of the layer, or the rules that split it"
            )
        return list(inputs)

    def _aligned(self, inputs: Sequence[_Value], sizes: Sequence[int]) -> tuple[Axes, list[_Value]]:
        """Returns the splits of a result that inputs are broadcast to, and inputs to match."""
        rank = len(sizes)
        axes: list[str | None] = [None] * rank
        for value in sorted(inputs, key=lambda value: -math.prod(value.sizes)):
            shift = rank - len(value.sizes)
            for dim, axis in enumerate(value.axes):
                if axis and axes[dim + shift] is None and axis not in axes:
                    axes[dim + shift] = axis
        return axes, [
            self._moved(
                value,
                [
                    axes[rank - len(value.sizes) + dim] if size > 1 else None
                    for dim, size in enumerate(value.sizes)
                ],
            )
            for value in inputs
        ]

    def _elementwise(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        if operation.type == "BiasAdd" and operation.get_attr("data_format") != b"NHWC":
            return None
        axes, matching = self._aligned(inputs, static_sizes(operation.outputs[0]))
        return self._local(operation, matching, [axes])

    def _keeping(
        self,
        operation: tf.Operation,
        inputs: list[_Value],
        mixed: Iterable[int],
        data: Sequence[int] = (0,),
        run: Callable[..., Any] | None = None,
        order: Callable[[Axes], Axes] = tuple,
    ) -> list[_Value]:
        """Adds an operation on each row of its data, across the `mixed` dims.

        `data` are the numbers of inputs with these dims; `order` takes the splits of an input to
        those of each output.
        """
        chosen = [inputs[number] for number in data]
        axes, _ = self._aligned(chosen, chosen[0].sizes)
        mixed = set(mixed)
        axes = [None if dim in mixed else axis for dim, axis in enumerate(axes)]
        changed = list(inputs)
        for number in data:
            changed[number] = self._moved(inputs[number], axes)
        if any(value.axes[dim] for value in chosen for dim in mixed):
            self._note_gather(operation)
        of_outputs = [tuple(order(axes))] * len(operation.outputs)
        return self._local(operation, changed, of_outputs, run)

    def _note_gather(self, operation: tf.Operation) -> None:
        layer = operation.name.rpartition("/")[0] or operation.name
        self.gathering.setdefault(layer, set()).add(operation.type)

    def _local_sizes(self, sizes: Sequence[int], axes: Axes) -> list[int]:
        mesh = self._lowering.mesh
        return [
            size // (1 if axis is None else mesh.size(axis))
            for size, axis in zip(sizes, axes, strict=True)
        ]

    def _reshape(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value]:
        value, new = inputs[0], static_sizes(operation.outputs[0])
        before: list[str | None] = [None] * len(value.sizes)
        after: list[str | None] = [None] * len(new)
        if 0 not in value.sizes:
            for old_dim, new_dim in leading_dims(value.sizes, new):
                axis = value.axes[old_dim]
                if axis is not None and new[new_dim] % self._lowering.mesh.size(axis) == 0:
                    before[old_dim], after[new_dim] = axis, axis
        if set(value.split_axes) != {axis for axis in before if axis}:
            self._note_gather(operation)
        sizes = self._local_sizes(new, after)
        moved = self._moved(value, before)
        return self._local(operation, [moved], [after], lambda x: [tf.reshape(x, sizes)])

    def _broadcast(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value]:
        value, new = inputs[0], static_sizes(operation.outputs[0])
        axes = [None] * (len(new) - len(value.axes)) + list(value.axes)
        sizes = self._local_sizes(new, axes)
        return self._local(operation, [value], [axes], lambda x: [tf.broadcast_to(x, sizes)])

    def _transpose(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        order = inputs[1].constant
        if order is None:
            return None
        axes = [inputs[0].axes[dim] for dim in order]
        return self._local(operation, inputs, [axes])

    def _softmax(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value]:
        return self._keeping(operation, inputs, [len(inputs[0].sizes) - 1])

    def _pool(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        if not operation.get_attr("data_format").decode().endswith("C"):
            return None
        return self._keeping(operation, inputs, range(1, len(inputs[0].sizes) - 1))

    def _pad(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        if inputs[1].constant is None:
            return None
        return self._keeping(operation, inputs, np.flatnonzero(inputs[1].constant.any(axis=1)))

    def _tile(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value]:
        sizes = zip(inputs[0].sizes, static_sizes(operation.outputs[0]), strict=True)
        return self._keeping(
            operation, inputs, [n for n, (old, new) in enumerate(sizes) if old != new]
        )

    def _split(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        data, at = (1, 0) if operation.type == "Split" else (0, 2)
        if inputs[at].constant is None:
            return None
        dim = int(inputs[at].constant) % len(inputs[data].sizes)
        return self._keeping(operation, inputs, [dim], [data])

    def _concat(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        if inputs[-1].constant is None:
            return None
        dim = int(inputs[-1].constant) % len(inputs[0].sizes)
        return self._keeping(operation, inputs, [dim], range(len(inputs) - 1))

    def _pack(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value]:
        dim = operation.get_attr("axis") % (len(inputs[0].sizes) + 1)
        return self._keeping(
            operation,
            inputs,
            [],
            range(len(inputs)),
            order=lambda axes: (*axes[:dim], None, *axes[dim:]),
        )

    def _unpack(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value]:
        dim = operation.get_attr("axis") % len(inputs[0].sizes)
        return self._keeping(
            operation, inputs, [dim], order=lambda axes: (*axes[:dim], *axes[dim + 1 :])
        )

    def _slice(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        begin, new = inputs[1].constant, static_sizes(operation.outputs[0])
        if begin is None:
            return None
        value, dims = inputs[0], range(len(new))
        cut = [dim for dim in dims if begin[dim] or new[dim] != value.sizes[dim]]
        sizes = [new[dim] if dim in cut else -1 for dim in dims]
        return self._keeping(
            operation, inputs[:1], cut, run=lambda x: [tf.slice(x, list(begin), sizes)]
        )

    def _strided_slice(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        parts = [value.constant for value in inputs[1:]]
        if any(part is None for part in parts):
            return None
        masks = {
            name: operation.get_attr(f"{name}_mask")
            for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        }
        value = inputs[0]
        key: list[Any] = []
        for at, (begin, end, step) in enumerate(zip(*parts, strict=True)):
            bit = 1 << at
            if masks["ellipsis"] & bit:
                key.append(Ellipsis)
            elif masks["new_axis"] & bit:
                key.append(None)
            elif masks["shrink_axis"] & bit:
                key.append(int(begin))
            else:
                first = None if masks["begin"] & bit else int(begin)
                last = None if masks["end"] & bit else int(end)
                key.append(slice(first, last, int(step)))
        taken = sum(part is not None and part is not Ellipsis for part in key)
        rest = [slice(None)] * (len(value.sizes) - taken)
        where = key.index(Ellipsis) if Ellipsis in key else len(key)
        key[where : where + (Ellipsis in key)] = rest
        mixed, kept, dim = [], [], 0
        for number, part in enumerate(key):
            if part is None:
                kept.append(None)
                continue
            if isinstance(part, int):
                mixed.append(dim)
            else:
                if part.indices(value.sizes[dim]) != (0, value.sizes[dim], 1):
                    mixed.append(dim)
                else:
                    # The slices of a split dim are shorter.
                    key[number] = slice(None)
                kept.append(dim)
            dim += 1
        return self._keeping(
            operation,
            inputs[:1],
            mixed,
            run=lambda x: [x[tuple(key)]],
            order=lambda axes: tuple(None if dim is None else axes[dim] for dim in kept),
        )

    def _reduce(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        value, over = inputs[0], inputs[1].constant
        if over is None:
            return None
        dims = {int(dim) % len(value.sizes) for dim in np.atleast_1d(over)}
        keeps = operation.get_attr("keep_dims")
        kept = [None if dim in dims else axis for dim, axis in enumerate(value.axes)]
        axes = kept if keeps else [axis for dim, axis in enumerate(kept) if dim not in dims]
        summed = [axis for dim, axis in enumerate(value.axes) if axis and dim in dims]
        # A mean of integers is rounded once.
        sums = ("Sum", "Mean") if value.dtype.is_floating else ("Sum",)
        if summed and operation.type not in sums:
            return None
        run = functools.partial(copied_operation, operation)
        if summed and operation.type == "Mean":
            parts = self._lowering.group_size(summed)
            run = lambda x, over: [copied_operation(operation, x, over)[0] / parts]  # noqa: E731
        (partial,) = self._local(operation, inputs, [axes], run)
        return [self._summed(partial, summed)]

    def _product(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        terms = _terms(operation, inputs)
        if terms is None:
            return None
        *operands, result = terms
        if any(len(set(term)) < len(term) for term in terms):
            # A diagonal, which is in no slice alone.
            return None
        # The axis of each letter. Two letters may claim one axis: that of the larger operand, often
        # a weight in a small test and the activations in a large model, keeps it.
        letters: dict[str, str] = {}
        order = sorted(zip(operands, inputs, strict=True), key=lambda p: -math.prod(p[1].sizes))
        votes: collections.Counter[tuple[str, str]] = collections.Counter()
        for term, value in order:
            for letter, axis in zip(term, value.axes, strict=True):
                if axis is not None:
                    votes[letter, axis] += 1
        for (letter, axis), _ in votes.most_common():
            if letter not in letters and axis not in letters.values():
                letters[letter] = axis
        moved = []
        for term, value in zip(operands, inputs, strict=True):
            wanted = [
                letters.get(letter) if size > 1 else None
                for letter, size in zip(term, value.sizes, strict=True)
            ]
            moved.append(self._moved(value, wanted))
        summed = [axis for letter, axis in letters.items() if letter not in result]
        axes = [letters.get(letter) for letter in result]
        (partial,) = self._local(operation, moved, [axes])
        return [self._summed(partial, summed)]

    def _convolution(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        x, filters = inputs
        rank = len(x.sizes)
        if not operation.get_attr("data_format").decode().endswith("C"):
            return None
        if x.sizes[-1] != filters.sizes[-2]:
            # In groups of channels.
            return None
        features = filters.axes[-1]
        channels = filters.axes[-2] or (x.axes[-1] if x.axes[-1] != features else None)
        batch = x.axes[0] if x.axes[0] not in (features, channels) else None
        inner: Axes = (None,) * (rank - 2)
        moved = [
            self._moved(x, (batch, *inner, channels)),
            self._moved(filters, (*inner, channels, features)),
        ]
        (partial,) = self._local(operation, moved, [(batch, *inner, features)])
        return [self._summed(partial, [channels] if channels else [])]

    def _gather(self, operation: tf.Operation, inputs: list[_Value]) -> list[_Value] | None:
        table, indices, dim = inputs
        if dim.constant is None or operation.get_attr("batch_dims"):
            return None
        at = int(dim.constant) % len(table.sizes)
        used = table.split_axes
        indices = self._moved(indices, [None if axis in used else axis for axis in indices.axes])
        axes = [*table.axes[:at], *indices.axes, *table.axes[at + 1 :]]
        if table.axes[at] is None:
            return self._local(operation, [table, indices, dim], [axes])
        if at:
            return None
        output = operation.outputs[0]
        like = _Value((), tuple(static_sizes(output)), output.dtype, 0, output.dtype.is_floating)

        def run(table_slices: Slices, index_slices: Slices) -> Slices:
            of_table = self._named(table_slices, table, "t")
            of_indices = self._named(index_slices, indices, "i")
            return gather(of_table, of_indices, of_table.shape.names[0]).slices

        key = "gather", table, indices
        return [self._communicated(key, run, [table, indices], axes, like)]

    def _named(self, slices: Slices, value: _Value, prefix: str) -> Tensor:
        """Returns slices as a tensor, whose split dims have names of rules for their axes."""
        names = {axis: dim for dim, axis in self._lowering.rules.rules}
        dims = [
            f"{prefix}_{number}" if axis is None else names[axis]
            for number, axis in enumerate(value.axes)
        ]
        shape = Shape.of(**dict(zip(dims, value.sizes, strict=True)))
        return Tensor(self._lowering, slices, shape)

    # Computation.

    def _compute(self, results: Sequence[_Value]) -> None:
        """Computes the slices of all steps' outputs that results need, level by level."""
        needed = {id(value) for value in results}
        steps: list[_Step] = []
        for step in reversed(self._steps):
            if any(id(value) in needed for value in step.outputs):
                needed.update(id(value) for value in step.inputs)
                steps.insert(0, step)
        by_level: dict[int, tuple[list[_Step], list[_Step]]] = {}
        for step in steps:
            level = max((value.level for value in step.inputs), default=0)
            by_level.setdefault(level, ([], []))[step.communicates].append(step)
        # Values that a later level, communication or the caller uses.
        kept = {id(value) for value in results}
        for step in steps:
            level = max((value.level for value in step.inputs), default=0)
            kept.update(id(v) for v in step.inputs if step.communicates or v.level < level)
        for level in sorted(by_level):
            local, communication = by_level[level]
            self._compute_locally(local, kept)
            for step in communication:
                slices = [self._slices(value) for value in step.inputs]
                step.outputs[0].slices = step.run(*slices)
        for value in results:
            value.slices = self._slices(value)

    def _slices(self, value: _Value) -> Slices:
        if value.slices is None and value.constant is not None:
            value.slices = self._lowering.map(lambda: _constant(value))
        assert value.slices is not None
        return value.slices

    def _compute_locally(self, steps: Sequence[_Step], kept: set[int]) -> None:
        """Computes steps without communication between them on each processor."""
        made = {id(value) for step in steps for value in step.outputs}
        inputs = {
            id(value): value
            for step in steps
            for value in step.inputs
            if id(value) not in made and value.constant is None
        }
        outputs = [v for step in steps for v in step.outputs if id(v) in kept]
        if not outputs:
            return

        def local(*tensors: tf.Tensor) -> list[tf.Tensor]:
            known: dict[int, Any] = dict(zip(inputs, tensors, strict=True))
            for step in steps:
                for value in step.inputs:
                    if id(value) not in known:
                        known[id(value)] = _constant(value)
                found = step.run(*(known[id(value)] for value in step.inputs))
                known.update(zip(map(id, step.outputs), found, strict=True))
            return [known[id(value)] for value in outputs]

        operands = [self._slices(value) for value in inputs.values()]
        for value, slices in zip(
            outputs, self._lowering.map_to_several(local, *operands), strict=True
        ):
            value.slices = slices


def _constant(value: _Value) -> tf.Tensor:
    return tf.constant(value.constant, value.dtype, shape=value.sizes)


def _shape(tensor: tf.Tensor) -> Shape:
    sizes = static_sizes(tensor)
    return Shape.of(**{f"dim_{number}": size for number, size in enumerate(sizes)})


def _terms(operation: tf.Operation, inputs: Sequence[_Value]) -> list[str] | None:
    """Returns the letters of the dims of the operands and of the result of a product."""
    if operation.type == "Einsum":
        operands, result = operation.get_attr("equation").decode().split("->")
        terms = operands.split(",")
        if "." in operands:
            free = [letter for letter in string.ascii_letters if letter not in operands]
            ranks = [
                len(v.sizes) - len(t.replace("...", "")) for t, v in zip(terms, inputs, strict=True)
            ]
            most = "".join(free[: max(ranks)])
            terms = [
                term.replace("...", most[len(most) - rank :])
                for term, rank in zip(terms, ranks, strict=True)
            ]
            result = result.replace("...", most)
        return [*terms, result]
    rank = len(static_sizes(operation.outputs[0])) - 2
    first = "transpose_a" if operation.type == "MatMul" else "adj_x"
    second = "transpose_b" if operation.type == "MatMul" else "adj_y"
    left = "zx" if operation.get_attr(first) else "xz"
    right = "yz" if operation.get_attr(second) else "zy"
    batch = string.ascii_lowercase[:rank]
    return [
        batch[rank - len(inputs[0].sizes) + 2 :] + left,
        batch[rank - len(inputs[1].sizes) + 2 :] + right,
        f"{batch}xy",
    ]


_Rule = Callable[[SplitGraph, tf.Operation, list[_Value]], "list[_Value] | None"]
# Owners of custom gradients that save memory, and equal that of the operations. Others need not: a
# gradient may pass through rounding.
_TRUE_GRADIENTS = (
    "tensorflow.python.ops.nn_impl.swish",
    "tensorflow.python.ops.custom_gradient.recompute_grad",
)
_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BiasAdd Cast Ceil CheckNumerics Cos
    Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Exp Expm1 Floor FloorDiv FloorMod Greater
    GreaterEqual Identity Inv IsFinite IsInf IsNan LeakyRelu Less LessEqual Lgamma Log Log1p
    LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Neg NotEqual OnesLike Pow
    PreventGradient RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt SelectV2 Selu Sigmoid Sign Sin
    Sinh Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tan Tanh TruncateDiv Xdivy
    Xlogy ZerosLike
""".split()
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE, SplitGraph._elementwise),
    **dict.fromkeys(["Reshape", "ExpandDims", "Squeeze"], SplitGraph._reshape),
    **dict.fromkeys(["MatMul", "BatchMatMulV2", "Einsum"], SplitGraph._product),
    **dict.fromkeys(["Conv2D", "Conv3D"], SplitGraph._convolution),
    **dict.fromkeys(["Sum", "Mean", "Max", "Min", "Prod", "All", "Any"], SplitGraph._reduce),
    **dict.fromkeys(["Softmax", "LogSoftmax"], SplitGraph._softmax),
    **dict.fromkeys(["MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"], SplitGraph._pool),
    **dict.fromkeys(["Pad", "PadV2", "MirrorPad"], SplitGraph._pad),
    **dict.fromkeys(["Split", "SplitV"], SplitGraph._split),
    "BroadcastTo": SplitGraph._broadcast,
    "Transpose": SplitGraph._transpose,
    "Tile": SplitGraph._tile,
    "ConcatV2": SplitGraph._concat,
    "Pack": SplitGraph._pack,
    "Unpack": SplitGraph._unpack,
    "Slice": SplitGraph._slice,
    "StridedSlice": SplitGraph._strided_slice,
    "GatherV2": SplitGraph._gather,
    "IdentityN": SplitGraph._passed_on,
}
