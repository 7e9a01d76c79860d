"""Placement: one graph for all devices, with one device per slice."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.backend.operations import on_each, sum_in_order
from pipemesh.backend.static_shape import static_sizes
from pipemesh.lowering.differentiate import local_gradient
from pipemesh.lowering.lowering import Lowering, Slices, devices_of, join_slices, whole_tensor
from pipemesh.mesh import LayoutRules, Mesh, TensorLayout

_PAIRWISE: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "sum": lambda a, b: sum_in_order([a, b]),
    "max": tf.maximum,
    "min": tf.minimum,
}


class PlacementLowering(Lowering):
    """A lowering to one graph with one tensor per device.

    Communication is plain TensorFlow: copies between devices, sums and concats; NCCL between the
    GPUs of one host. In graphs (`tf.function` or TF1) every operation on a slice and its gradient
    is on the slice's device. Eager mode computes the same values, but TensorFlow places gradients
    as it likes.

    Attributes:
        devices: the device of each processor.

    Raises:
        DeviceError: the number of devices is not that of the mesh, or one does not exist.
        LayoutError: a rule names an unknown axis.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.mesh import LayoutRules, Mesh, Shape
        >>> mesh, rules = Mesh.from_text("data:2"), LayoutRules.from_text("batch:data")
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> layout = lowering.tensor_layout(Shape.of(batch=4))
        >>> slices = lowering.import_tensor(tf.constant([1, 2, 3, 4]), layout)
        >>> [part.numpy().tolist() for part in slices]
        [[1, 2], [3, 4]]
        >>> lowering.all_reduce(slices, ["data"])[0].numpy().tolist()
        [4, 6]
    """

    def __init__(self, mesh: Mesh, rules: LayoutRules, devices: Sequence[str]) -> None:
        super().__init__(mesh, rules)
        self.devices = devices_of(mesh, devices)
        self.num_slices = len(devices)

    def map_to_several(
        self, function: Callable[..., Sequence[tf.Tensor]], *operands: Slices
    ) -> list[Slices]:
        """Applies a local function on each device."""
        with self.computing_slices():
            results = [
                local_gradient(function, [operand[i] for operand in operands], device)
                for i, device in enumerate(self.devices)
            ]
        return list(zip(*results, strict=True))

    def raw_map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function on each device, without a gradient."""
        return tuple(on_each(self.devices, function, *operands))

    def coordinate(self, axis: str) -> Slices:
        """Returns constants, one for each device."""
        at = [self.mesh.coordinates(processor)[axis] for processor in range(self.num_slices)]
        return tuple(on_each(self.devices, lambda value: tf.constant(value, tf.int32), at))

    def with_gradient(
        self,
        forward: Callable[..., Slices],
        backward: Callable[[Slices], Sequence[Slices]],
        *operands: Slices,
    ) -> Slices:
        """Computes `forward(*operands)` with the gradients that `backward` computes."""
        with unrecorded():
            outputs = forward(*operands)
        if not operands[0][0].dtype.is_floating:
            return outputs

        def flat(grads: list[tf.Tensor]) -> list[tf.Tensor]:
            return [grad for slices in backward(tuple(grads)) for grad in slices]

        inputs = [tensor for slices in operands for tensor in slices]
        return tuple(attach_gradient(outputs, inputs, flat, True))

    def import_tensor(self, tensor: tf.Tensor, layout: TensorLayout) -> Slices:
        """Cuts the tensor on its own device, and sends each device its slice."""
        tensor = tf.convert_to_tensor(tensor)
        with _beside(tensor):
            tensor = whole_tensor(tensor, layout)
        return self._import(tensor, layout, "import", backward=False)

    def export_tensor(self, slices: Slices, layout: TensorLayout) -> tf.Tensor:
        """Joins the slices on the first device."""
        return self._export(slices, layout, "export", backward=False)

    # `_import` and `_export` are each other's gradient. `name` and `backward` select the row of the
    # costs.

    def _import(self, tensor: tf.Tensor, layout: TensorLayout, name: str, backward: bool) -> Slices:
        begins = [layout.slice_begin(processor) for processor in range(self.num_slices)]
        vector = functools.partial(tf.constant, dtype=tf.int32, shape=[len(layout.axes)])
        with unrecorded():
            # Cut on its own device, so that only the slices are sent.
            with _beside(tensor):
                cuts = {
                    begin: tf.slice(tensor, vector(begin), vector(layout.slice_shape))
                    for begin in dict.fromkeys(begins)
                }
            slices = on_each(self.devices, tf.identity, [cuts[begin] for begin in begins])
        self._count_transfer(name, self.devices, layout, tensor.dtype, backward)
        if tensor.dtype.is_floating:
            slices = attach_gradient(
                slices, [tensor], lambda g: [self._export(tuple(g), layout, name, True)], True
            )
        return tuple(slices)

    def _export(self, slices: Slices, layout: TensorLayout, name: str, backward: bool) -> tf.Tensor:
        used: list[int] = []

        def slice_of(processor: int) -> tf.Tensor:
            used.append(processor)
            return slices[processor]

        with unrecorded(), tf.device(self.devices[0]):
            whole = tf.identity(join_slices(layout, slice_of))
        senders = [self.devices[i] for i in used]
        self._count_transfer(name, senders, layout, whole.dtype, backward)
        if whole.dtype.is_floating:
            (whole,) = attach_gradient(
                [whole], slices, lambda g: self._import(g[0], layout, name, True), True
            )
        return whole

    def _count_transfer(
        self,
        name: str,
        devices: Sequence[str],
        layout: TensorLayout,
        dtype: tf.DType,
        backward: bool,
    ) -> None:
        """Counts the slices that move between the first device and others."""
        away = sum(device != self.devices[0] for device in devices)
        self.costs.add_transfer(name, away * math.prod(layout.slice_shape) * dtype.size, backward)

    def raw_all_reduce(self, x: Slices, axes: Sequence[str], op: str) -> Slices:
        """Reduces pairwise in a tree and copies the result back, or uses NCCL."""
        results = list(x)
        for group in self.mesh.groups(axes):
            tensors, devices = [x[i] for i in group], [self.devices[i] for i in group]
            if collectives.can_use_nccl(tensors, devices):
                reduced = collectives.nccl_all_reduce(tensors, devices, op)
            else:
                reduced = tree(tensors, devices, op)
            for i, tensor in zip(group, reduced, strict=True):
                results[i] = tensor
        return tuple(results)

    def raw_all_gather(self, x: Slices, axis: str, dim: int) -> Slices:
        """Joins the slices of each group on every device of it."""
        joined = [[x[j] for j in group] for group in self._groups(axis)]
        return tuple(on_each(self.devices, lambda parts: tf.concat(parts, dim), joined))

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Splits on the sending device and joins on the receiving one."""
        parts = self.mesh.size(axis)
        pieces = on_each(self.devices, lambda t: tf.split(t, parts, split_dim), x)
        arrived = [
            [pieces[j][group.index(i)] for j in group] for i, group in enumerate(self._groups(axis))
        ]
        return tuple(on_each(self.devices, lambda of_one: tf.concat(of_one, concat_dim), arrived))

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Copies between devices."""
        source = {b: a for a, b in pairs}

        def arrived(i: int, group: tuple[int, ...]) -> tf.Tensor:
            at = group.index(i)
            return tf.identity(x[group[source[at]]]) if at in source else tf.zeros_like(x[i])

        return tuple(on_each(self.devices, arrived, range(len(x)), self._groups(axis)))

    def _groups(self, axis: str) -> list[tuple[int, ...]]:
        """Returns for each processor those along an axis, itself among them."""
        group_of = {i: group for group in self.mesh.groups([axis]) for i in group}
        return [group_of[i] for i in range(self.num_slices)]


def _beside(tensor: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that places operations on the device of a tensor."""
    if tf.is_symbolic_tensor(tensor):
        graph = tf.compat.v1.get_default_graph()
        return graph.colocate_with(tensor.op, ignore_existing=True)
    return tf.device(tensor.device)


def tree(tensors: Sequence[tf.Tensor], devices: Sequence[str], op: str) -> list[tf.Tensor]:
    """Reduces in n - 1 operations of depth log n; all members get bitwise equal results."""
    partial = list(tensors)
    step = 1
    while step < len(partial):
        for i in range(0, len(partial) - step, 2 * step):
            with tf.device(devices[i]):
                partial[i] = _PAIRWISE[op](partial[i], partial[i + step])
        step *= 2
    return on_each(devices, lambda: tf.identity(partial[0]))


Begin = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block that one processor sends to one other."""

    source: int
    target: int
    # The block's position in the whole tensor, in the source's slice and in the target's.
    begin: Begin
    in_source: Begin
    in_target: Begin
    size: Begin


class Handover:
    """The pieces that move a tensor from a layout on some devices to a layout on others."""

    # Each part is sent once, from its first holder to the first device that needs it. That device
    # copies it to others of its side. Gradients take the same way back. So the whole tensor crosses
    # between the two sides once, whatever the layouts.

    def __init__(self, sender: TensorLayout, receiver: TensorLayout) -> None:
        self._sources, self._targets = _first_holders(sender), _first_holders(receiver)
        self.pieces: list[Piece] = []
        for to, source in itertools.product(sorted(set(self._targets)), sorted(set(self._sources))):
            sent, received = (
                np.array(layout.slice_begin(processor), int)
                for layout, processor in ((sender, source), (receiver, to))
            )
            begin = np.maximum(sent, received)
            size = np.minimum(sent + sender.slice_shape, received + receiver.slice_shape) - begin
            if np.all(size > 0):
                places = (begin, begin - sent, begin - received, size)
                self.pieces.append(Piece(source, to, *(tuple(place.tolist()) for place in places)))

    def send(self, slices: Slices, devices: Sequence[str]) -> list[tf.Tensor]:
        """Cuts the sender's slices into pieces, each on the device that sends it."""

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Joins the gradients of the pieces for each slice and for its copies."""
            return [
                self._joined(grads, [p.source == holder for p in self.pieces], device)
                for holder, device in zip(self._sources, devices, strict=True)
            ]

        senders = [devices[piece.source] for piece in self.pieces]
        with unrecorded():
            pieces = on_each(
                senders,
                lambda piece: _cut(slices[piece.source], piece.in_source, piece.size),
                self.pieces,
            )
        if slices[0].dtype.is_floating:
            pieces = attach_gradient(pieces, slices, back, True)
        # The gradient is attached to this call, which has no device.
        return on_each(senders, tf.identity, pieces)

    def receive(self, pieces: Sequence[tf.Tensor], devices: Sequence[str]) -> Slices:
        """Joins the pieces and copies equal slices; dims that are not split may have any size."""

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Cuts each piece's gradient from one holder: every holder has the whole gradient."""
            return on_each(
                [devices[piece.target] for piece in self.pieces],
                lambda piece, tensor: _cut(
                    grads[piece.target], piece.in_target, static_sizes(tensor)
                ),
                self.pieces,
                pieces,
            )

        with unrecorded():
            slices: list[tf.Tensor] = []
            for number, (holder, device) in enumerate(zip(self._targets, devices, strict=True)):
                if holder == number:
                    chosen = [piece.target == holder for piece in self.pieces]
                    slices.append(self._joined(pieces, chosen, device))
                else:
                    with tf.device(device):
                        slices.append(tf.identity(slices[holder]))
        if not pieces[0].dtype.is_floating:
            return tuple(slices)
        return tuple(attach_gradient(slices, pieces, back, True))

    def _joined(
        self, tensors: Sequence[tf.Tensor], chosen: Sequence[bool], device: str
    ) -> tf.Tensor:
        """Joins the chosen pieces, those of one slice, on a device."""
        pieces = itertools.compress(zip(self.pieces, tensors, strict=True), chosen)
        with tf.device(device):
            return tf.identity(_join([(piece.begin, tensor) for piece, tensor in pieces], 0))


def _cut(tensor: tf.Tensor, begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
    """Returns a part of a tensor, or the tensor itself if the part is all of it."""
    if static_sizes(tensor) == list(size):
        return tf.identity(tensor)
    return tf.slice(tensor, begin, size)


def _join(pieces: Sequence[tuple[Begin, tf.Tensor]], dim: int) -> tf.Tensor:
    """Joins a grid of pieces, keyed by their positions, along `dim` and all later dims."""
    if len(pieces) == 1:
        return pieces[0][1]
    rows: dict[int, list[tuple[Begin, tf.Tensor]]] = {}
    for begin, tensor in pieces:
        rows.setdefault(begin[dim], []).append((begin, tensor))
    parts = [_join(rows[begin], dim + 1) for begin in sorted(rows)]
    return parts[0] if len(parts) == 1 else tf.concat(parts, dim)


def _first_holders(layout: TensorLayout) -> list[int]:
    """Returns for each processor the first one that holds the same slice."""
    first: dict[Begin, int] = {}
    return [
        first.setdefault(layout.slice_begin(processor), processor)
        for processor in range(layout.mesh.num_devices)
    ]
