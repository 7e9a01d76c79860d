"""Counts of what a program sends and computes, recorded while it is built."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.gradients import is_recorded
from pipemesh.mesh import Mesh, TensorLayout
from pipemesh.plan.machine import Key
from pipemesh.plan.network import sent_bytes
from pipemesh.text import columns

FORWARD, BACKWARD = "forward", "backward"


class Work(NamedTuple):
    """The work of a function of slices on one device."""

    flops: int
    touched: int  # bytes of memory that it reads and writes
    gradients: int = 0  # number of operands with a gradient, each as much work again
    direction: str = FORWARD  # the pass that the function itself belongs to


@dataclasses.dataclass
class OperationCosts:
    """Counts of what one device sends and computes, recorded while the program is built.

    A call inside a loop is built once and counts as many times as `repeated` was given. The bytes
    sent are for a slice of b bytes and a group of n members, under the usual ring algorithms:

    ==============  ====================
    primitive       bytes
    ==============  ====================
    all_reduce      2 b (n - 1) / n
    all_gather      b (n - 1)
    all_to_all      b (n - 1) / n
    reduce_scatter  b (n - 1) / n
    permute         b
    ==============  ====================

    An operation that communicates in another way counts its real bytes. For example,
    `TfLowering` has no permute kernel, so its permutes count as all-gathers.

    Computation counts by the axes that split a tensor of the operation. Along other axes, all
    devices compute the same. A product of two numbers that is summed is two flops. Element-wise
    operations and reductions are one flop for each element of their largest tensor, and operations
    that move elements none. Bytes of memory are those of the operands and results of each function
    of slices, without what a compiler saves by fusing functions.

    The gradient counts when a tape records the operation: as the forward pass once more for each
    operand with a gradient, which is exact for products. Operations that no tape sees when they are
    made have a forward pass only, as in graphs of TensorFlow 1, and what bodies of `tf.while_loop`
    compute from loop variables.

    Attributes:
        mesh: the mesh.
        rows: calls and bytes sent by axes, primitive and pass.
        work: calls, flops and bytes of memory by axes, operation and pass.
        transfers: calls and bytes of whole tensors that enter or leave the mesh under placement, by
            `"import"` or `"export"` and pass. They count the bytes between the first device and all
            others. They belong to no axis and are not in the table.
        by_dims: whether work counts by the dims of tensors instead, of a mesh that has an axis for
            each; for a program that nothing splits.

    Example:
        >>> costs = OperationCosts(Mesh.from_text("data:2;model:4"))
        >>> costs.add("all_reduce", ["model"], tf.zeros([2, 5]), backward=False)
        >>> costs.total_bytes
        60
        >>> print(costs)
        axes   primitive   pass     calls  bytes
        model  all_reduce  forward      1     60
        total                           1     60
        >>> costs.add_work("einsum", ["model"], Work(flops=600, touched=340, gradients=2))
        >>> costs.flops, costs.same_flops("data"), costs.same_flops("model")
        (1800, 1800, 0)
    """

    mesh: Mesh
    rows: dict[Key, tuple[int, int]] = dataclasses.field(default_factory=dict)
    work: dict[Key, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    transfers: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    by_dims: bool = False
    _times: int = 1

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Counts everything built inside, such as the body of a loop, `times` times.

        Args:
            times: number of iterations of the loop.
        """
        outside = self._times
        self._times = outside * times
        try:
            yield
        finally:
            self._times = outside

    def add(
        self,
        primitive: str,
        axes: Sequence[str],
        slice_: tf.Tensor,
        backward: bool,
        sent: int | None = None,
    ) -> None:
        """Counts one call.

        Args:
            primitive: `"all_reduce"`, `"all_gather"`, `"all_to_all"`, `"reduce_scatter"` or
                `"permute"`.
            axes: the axes along which devices communicate.
            slice_: the input of one device; counts as 0 bytes if its shape is not static.
            backward: whether the call belongs to the backward pass.
            sent: bytes to count instead of the usual number.
        """
        if sent is None:
            size = (slice_.shape.num_elements() or 0) * slice_.dtype.size
            members = math.prod(self.mesh.size(axis) for axis in axes)
            sent = sent_bytes(primitive, size, members)
        self.add_sent(primitive, axes, sent, backward)

    def add_sent(self, primitive: str, axes: Sequence[str], sent: int, backward: bool) -> None:
        """Counts one call that sends so many bytes; see `add`."""
        key = (self._ordered(axes), primitive, _pass_name(backward))
        calls, total = self.rows.get(key, (0, 0))
        self.rows[key] = (calls + self._times, total + sent * self._times)

    def add_work(self, operation: str, axes: Sequence[str], *functions: Work) -> None:
        """Counts an operation, and its gradient.

        Args:
            operation: its name.
            axes: the axes that split a tensor of it.
            *functions: the work of its functions of slices.
        """
        for direction in (FORWARD, BACKWARD):
            times = [work.gradients * (direction == BACKWARD) for work in functions]
            times = [
                n + (work.direction == direction) for n, work in zip(times, functions, strict=True)
            ]
            if not any(times):
                continue
            flops = sum(n * work.flops for n, work in zip(times, functions, strict=True))
            touched = sum(n * work.touched for n, work in zip(times, functions, strict=True))
            key = (self._ordered(axes), operation, direction)
            before = self.work.get(key, (0, 0, 0))
            added = (number * self._times for number in (1, flops, touched))
            calls, flops, touched = map(sum, zip(before, added, strict=True))
            self.work[key] = calls, flops, touched

    def dividing(self, layout: TensorLayout) -> tuple[str, ...]:
        """Returns the axes, or dims, by which the work on a tensor counts."""
        return layout.shape.names if self.by_dims else layout.split_axes

    def _ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axis_names if axis in axes)

    def add_transfer(self, name: str, sent: int, backward: bool) -> None:
        """Counts a whole tensor that enters or leaves the mesh.

        Args:
            name: `"import"` or `"export"`.
            sent: the bytes of all slices that move to another device.
            backward: whether the transfer belongs to the backward pass.
        """
        key = (name, _pass_name(backward))
        calls, total = self.transfers.get(key, (0, 0))
        self.transfers[key] = (calls + self._times, total + sent * self._times)

    def bytes(self, axis: str) -> int:
        """Returns the bytes sent along one axis, alone or together with other axes."""
        return sum(sent for (axes, _, _), (_, sent) in self.rows.items() if axis in axes)

    def calls(self, primitive: str) -> int:
        """Returns the number of calls of a primitive in both passes."""
        return sum(calls for (_, name, _), (calls, _) in self.rows.items() if name == primitive)

    @property
    def total_bytes(self) -> int:
        """Returns the bytes sent by one device."""
        return sum(sent for _, sent in self.rows.values())

    def include(self, other: OperationCosts) -> None:
        """Adds the counts of another program."""
        for mine, theirs in ((self.rows, other.rows), (self.work, other.work)):
            counts: dict[Key, Any] = mine  # pyright: ignore[reportAssignmentType]
            for key, row in theirs.items():
                before = counts.get(key, (0,) * len(row))
                counts[key] = tuple(map(sum, zip(before, row, strict=True)))

    @property
    def flops(self) -> int:
        """Returns the flops of one device."""
        return sum(flops for _, flops, _ in self.work.values())

    @property
    def touched_bytes(self) -> int:
        """Returns the bytes of memory that one device reads and writes."""
        return sum(touched for _, _, touched in self.work.values())

    def same_flops(self, axis: str) -> int:
        """Returns those flops of one device that all devices along an axis compute alike.

        Raises:
            MeshError: there is no such axis.
        """
        self.mesh.check_axis(axis)
        return sum(flops for (axes, _, _), (_, flops, _) in self.work.items() if axis not in axes)

    def clear(self) -> None:
        """Resets all counts."""
        self.rows.clear()
        self.work.clear()
        self.transfers.clear()

    def __str__(self) -> str:
        table = [("axes", "primitive", "pass", "calls", "bytes")]
        for (axes, primitive, direction), (calls, sent) in sorted(self.rows.items()):
            table.append(("+".join(axes), primitive, direction, f"{calls:,}", f"{sent:,}"))
        total = sum(calls for calls, _ in self.rows.values())
        table.append(("total", "", "", f"{total:,}", f"{self.total_bytes:,}"))
        lines = columns(table, left=range(3))
        if not self.work:
            return "\n".join(lines)
        work = [["split over", "operation", "pass", "calls", "flops", "bytes of memory"]]
        # Most flops first.
        for (axes, operation, direction), numbers in sorted(
            self.work.items(), key=lambda row: (*(-number for number in row[1][1:]), row[0])
        ):
            first = ["+".join(axes) or "-", operation, direction]
            work.append([*first, *(f"{number:,}" for number in numbers)])
        calls = sum(calls for calls, _, _ in self.work.values())
        work.append(["total", "", "", f"{calls:,}", f"{self.flops:,}", f"{self.touched_bytes:,}"])
        lines += ["", *columns(work, left=range(3))]
        wide = [axis for axis in self.mesh.axis_names if self.mesh.size(axis) > 1]
        same = [f"{axis} {self.same_flops(axis) / max(self.flops, 1):.1%}" for axis in wide]
        if same:
            lines.append(f"flops that all devices along an axis compute alike: {', '.join(same)}")
        return "\n".join(lines)


def _pass_name(backward: bool) -> str:
    return BACKWARD if backward else FORWARD


@dataclasses.dataclass
class _Operation:
    """An operation while it is made."""

    is_arithmetic: bool  # Functions of slices are a flop for each element.
    costs: OperationCosts | None = None
    functions: list[Work] = dataclasses.field(default_factory=list[Work])


class _Open(threading.local):
    operation: _Operation | None = None


_open = _Open()


@contextlib.contextmanager
def operation(name: str, tensors: Sequence[Any], is_arithmetic: bool = True) -> Iterator[None]:
    """Counts functions of slices that are mapped inside as one operation.

    Args:
        name: its name; operations that it is made of count under its name too.
        tensors: tensors with named dims, whose splits divide the work; read at the end.
        is_arithmetic: whether functions are one flop for each element, else none.
    """
    outer = _open.operation
    if outer is not None:
        before, outer.is_arithmetic = outer.is_arithmetic, is_arithmetic
        try:
            yield
        finally:
            outer.is_arithmetic = before
        return
    made = _open.operation = _Operation(is_arithmetic)
    try:
        yield
    finally:
        _open.operation = None
    if made.costs is not None:
        axes = [axis for tensor in tensors for axis in made.costs.dividing(tensor.layout)]
        made.costs.add_work(name, axes, *made.functions)


def count_map(
    costs: OperationCosts,
    operands: Sequence[tf.Tensor],
    result: tf.Tensor,
    flops: int | None,
    backward: bool,
) -> None:
    """Counts a function of slices, given the operands and the result of one device."""
    elements = [int(tensor.shape.num_elements() or 0) for tensor in (*operands, result)]
    sizes = zip(elements, (*operands, result), strict=True)
    touched = sum(number * tensor.dtype.size for number, tensor in sizes)
    made = _open.operation
    if flops is None:
        flops = max(elements) if made is None or made.is_arithmetic else 0
    gradients = 0
    if result.dtype.is_floating and is_recorded([result]):
        gradients = sum(t.dtype.is_floating and is_recorded([t]) for t in operands)
    function = Work(flops, touched, gradients, _pass_name(backward))
    if made is None:
        # Nothing is known of its tensors, so it counts as split over all axes.
        costs.add_work("map", costs.mesh.axis_names, function)
    else:
        made.costs = costs
        made.functions.append(function)
