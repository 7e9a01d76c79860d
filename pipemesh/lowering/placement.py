"""Placement: one graph for all devices, with one device per slice."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.devices import check_devices_exist
from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.backend.operations import sum_in_order
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import DeviceError
from pipemesh.lowering.differentiate import local_gradient
from pipemesh.lowering.lowering import Lowering, Slices, whole_tensor
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
        self.devices = check_devices_exist(devices)
        if len(devices) != mesh.num_devices:
            raise DeviceError(
                f"{len(devices)} devices were given for mesh '{mesh}', which has "
                f"{mesh.num_devices} processors; give one device for each"
            )

    @property
    def num_slices(self) -> int:
        """Returns the number of devices."""
        return len(self.devices)

    def map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function on each device."""
        with self.computing_slices():
            return tuple(
                local_gradient(function, [operand[i] for operand in operands], device)
                for i, device in enumerate(self.devices)
            )

    def raw_map(self, function: Callable[..., tf.Tensor], *operands: Slices) -> Slices:
        """Applies a local function on each device, without a gradient."""
        results: list[tf.Tensor] = []
        for i, device in enumerate(self.devices):
            with tf.device(device):
                results.append(function(*(operand[i] for operand in operands)))
        return tuple(results)

    def coordinate(self, axis: str) -> Slices:
        """Returns constants, one for each device."""
        at = [self.mesh.coordinates(processor)[axis] for processor in range(self.num_slices)]
        results: list[tf.Tensor] = []
        for value, device in zip(at, self.devices, strict=True):
            with tf.device(device):
                results.append(tf.constant(value, tf.int32))
        return tuple(results)

    def with_gradient(
        self,
        forward: Callable[[Slices], Slices],
        backward: Callable[[Slices], Slices],
        slices: Slices,
    ) -> Slices:
        """Computes `forward(slices)` with the gradient that `backward` computes."""
        with unrecorded():
            outputs = forward(slices)
        if not slices[0].dtype.is_floating:
            return outputs
        return tuple(attach_gradient(outputs, slices, lambda g: backward(tuple(g)), True))

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
        with unrecorded():
            slices = self._scatter(tensor, layout, name, backward)
        if not tensor.dtype.is_floating:
            return tuple(slices)

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [self._export(tuple(grads), layout, name, backward=True)]

        return tuple(attach_gradient(slices, [tensor], back, True))

    def _export(self, slices: Slices, layout: TensorLayout, name: str, backward: bool) -> tf.Tensor:
        with unrecorded():
            whole = self._join(slices, layout, name, backward)
        if not whole.dtype.is_floating:
            return whole

        def back(grads: Sequence[tf.Tensor]) -> Slices:
            return self._import(grads[0], layout, name, backward=True)

        return attach_gradient([whole], slices, back, True)[0]

    def _scatter(
        self, tensor: tf.Tensor, layout: TensorLayout, name: str, backward: bool
    ) -> list[tf.Tensor]:
        """Cuts the tensor on its own device, so that only the slices are sent."""
        tensor = tf.convert_to_tensor(tensor)
        cuts: dict[tuple[int, ...], tf.Tensor] = {}
        slices: list[tf.Tensor] = []
        with _beside(tensor):
            for processor in range(self.num_slices):
                begin = layout.slice_begin(processor)
                if begin not in cuts:
                    cuts[begin] = tf.slice(tensor, *_begin_and_size(layout, processor))
        for processor, device in enumerate(self.devices):
            with tf.device(device):
                slices.append(tf.identity(cuts[layout.slice_begin(processor)]))
        away = sum(device != self.devices[0] for device in self.devices)
        sent = away * math.prod(layout.slice_shape) * tensor.dtype.size
        self.costs.add_transfer(name, sent, backward)
        return slices

    def _join(
        self, slices: Sequence[tf.Tensor], layout: TensorLayout, name: str, backward: bool
    ) -> tf.Tensor:
        """Joins one copy of each slice on the first device."""
        used: list[int] = []

        def join(dim: int, at: dict[str, int]) -> tf.Tensor:
            if dim == len(layout.axes):
                used.append(self.mesh.processor(at))
                return slices[used[-1]]
            axis = layout.axes[dim]
            if axis is None:
                return join(dim + 1, at)
            parts = [join(dim + 1, {**at, axis: i}) for i in range(self.mesh.size(axis))]
            return tf.concat(parts, dim)

        with tf.device(self.devices[0]):
            whole = tf.identity(join(0, {}))
        away = sum(self.devices[i] != self.devices[0] for i in used)
        sent = away * math.prod(layout.slice_shape) * whole.dtype.size
        self.costs.add_transfer(name, sent, backward)
        return whole

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
        results = list(x)
        for group in self.mesh.groups([axis]):
            for i in group:
                with tf.device(self.devices[i]):
                    results[i] = tf.concat([x[j] for j in group], dim)
        return tuple(results)

    def raw_all_to_all(self, x: Slices, axis: str, split_dim: int, concat_dim: int) -> Slices:
        """Splits on the sending device and joins on the receiving one."""
        parts = self.mesh.size(axis)
        results = list(x)
        for group in self.mesh.groups([axis]):
            pieces: list[list[tf.Tensor]] = []
            for i in group:
                with tf.device(self.devices[i]):
                    pieces.append(tf.split(x[i], parts, split_dim))
            for at, i in enumerate(group):
                with tf.device(self.devices[i]):
                    results[i] = tf.concat([piece[at] for piece in pieces], concat_dim)
        return tuple(results)

    def raw_permute(self, x: Slices, axis: str, pairs: Sequence[tuple[int, int]]) -> Slices:
        """Copies between devices."""
        source = {b: a for a, b in pairs}
        results = list(x)
        for group in self.mesh.groups([axis]):
            for at, i in enumerate(group):
                with tf.device(self.devices[i]):
                    results[i] = (
                        tf.identity(x[group[source[at]]]) if at in source else tf.zeros_like(x[i])
                    )
        return tuple(results)


def _beside(tensor: tf.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that places operations on the device of a tensor."""
    if tf.is_symbolic_tensor(tensor):
        graph = tf.compat.v1.get_default_graph()
        return graph.colocate_with(tensor.op, ignore_existing=True)
    return tf.device(tensor.device)


def _begin_and_size(layout: TensorLayout, processor: int) -> tuple[tf.Tensor, tf.Tensor]:
    rank = len(layout.axes)
    begin = tf.constant(layout.slice_begin(processor), tf.int32, shape=[rank])
    return begin, tf.constant(layout.slice_shape, tf.int32, shape=[rank])


def tree(tensors: Sequence[tf.Tensor], devices: Sequence[str], op: str) -> list[tf.Tensor]:
    """Reduces in n - 1 operations of depth log n; all members get bitwise equal results."""
    partial = list(tensors)
    step = 1
    while step < len(partial):
        for i in range(0, len(partial) - step, 2 * step):
            with tf.device(devices[i]):
                partial[i] = _PAIRWISE[op](partial[i], partial[i + step])
        step *= 2
    return copies(partial[0], devices)


def copies(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """Copies a tensor to each device, without a gradient."""
    results: list[tf.Tensor] = []
    for device in devices:
        with tf.device(device):
            results.append(tf.identity(tensor))
    return results


Begin = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block that one device sends to one other.

    Attributes:
        source: the sending processor.
        target: the receiving processor.
        begin: position of the block in the whole tensor.
        size: the block's sizes.
        in_source: position of the block in the source's slice.
        in_target: position of the block in the target's slice.
    """

    source: int
    target: int
    begin: Begin
    size: Begin
    in_source: Begin
    in_target: Begin


class Handover:
    """The pieces that move a tensor from a layout on some devices to a layout on others.

    Each part is sent once, from its first holder to the first device that needs it. That device
    copies it to others of its side. Gradients take the same way back. So the whole tensor crosses
    between the two sides once, whatever the layouts.

    Args:
        sender: the current layout.
        receiver: the new layout, of the same shape on another mesh.

    Attributes:
        pieces: the blocks to send.

    Example:
        >>> from pipemesh.mesh import Mesh, Shape
        >>> shape, axes = Shape.of(batch=4, heads=8), (None, "model")
        >>> layouts = [TensorLayout(shape, Mesh((("model", n),)), axes) for n in (2, 4)]
        >>> [(piece.source, piece.target, piece.size) for piece in Handover(*layouts).pieces]
        [(0, 0, (4, 2)), (0, 1, (4, 2)), (1, 2, (4, 2)), (1, 3, (4, 2))]
    """

    def __init__(self, sender: TensorLayout, receiver: TensorLayout) -> None:
        self._sources, self._targets = _first_holders(sender), _first_holders(receiver)
        self.pieces: list[Piece] = []
        for to, source in itertools.product(sorted(set(self._targets)), sorted(set(self._sources))):
            starts, ends = (
                [of(a, b) for a, b in zip(*both, strict=True)]
                for of, both in (
                    (max, (sender.slice_begin(source), receiver.slice_begin(to))),
                    (min, (_end(sender, source), _end(receiver, to))),
                )
            )
            if all(a < b for a, b in zip(starts, ends, strict=True)):
                self.pieces.append(
                    Piece(
                        source,
                        to,
                        tuple(starts),
                        _minus(ends, starts),
                        _minus(starts, sender.slice_begin(source)),
                        _minus(starts, receiver.slice_begin(to)),
                    )
                )

    def send(self, slices: Slices, devices: Sequence[str]) -> list[tf.Tensor]:
        """Cuts the sender's slices into pieces, each on the device that sends it."""

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Joins the gradients of the pieces for each slice and for its copies."""
            return [
                self._joined(grads, [p.source == holder for p in self.pieces], device)
                for holder, device in zip(self._sources, devices, strict=True)
            ]

        with unrecorded():
            pieces = []
            for piece in self.pieces:
                with tf.device(devices[piece.source]):
                    whole = slices[piece.source]
                    pieces.append(_cut(whole, piece.in_source, piece.size))
        if slices[0].dtype.is_floating:
            pieces = attach_gradient(pieces, slices, back, True)
        # The gradient is attached to this call, which has no device.
        for number, piece in enumerate(self.pieces):
            with tf.device(devices[piece.source]):
                pieces[number] = tf.identity(pieces[number])
        return pieces

    def receive(self, pieces: Sequence[tf.Tensor], devices: Sequence[str]) -> Slices:
        """Joins the pieces and copies equal slices; dims that are not split may have any size."""

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Cuts each piece's gradient from one holder: every holder has the whole gradient."""
            found = []
            for piece, tensor in zip(self.pieces, pieces, strict=True):
                with tf.device(devices[piece.target]):
                    grad = grads[piece.target]
                    found.append(_cut(grad, piece.in_target, static_sizes(tensor)))
            return found

        with unrecorded():
            slices: list[tf.Tensor] = []
            for number, (holder, device) in enumerate(zip(self._targets, devices, strict=True)):
                if holder == number:
                    mine = [piece.target == holder for piece in self.pieces]
                    slices.append(self._joined(pieces, mine, device))
                else:
                    with tf.device(device):
                        slices.append(tf.identity(slices[holder]))
        if not pieces[0].dtype.is_floating:
            return tuple(slices)
        return tuple(attach_gradient(slices, pieces, back, True))

    def _joined(self, tensors: Sequence[tf.Tensor], mine: Sequence[bool], device: str) -> tf.Tensor:
        """Joins the pieces of one slice on a device."""
        chosen = [
            (piece.begin, tensor)
            for piece, tensor, own in zip(self.pieces, tensors, mine, strict=True)
            if own
        ]
        with tf.device(device):
            return tf.identity(_join(chosen, 0))


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


def _end(layout: TensorLayout, processor: int) -> list[int]:
    return [part.stop for part in layout.slice_ranges(processor)]


def _minus(a: Sequence[int], b: Sequence[int]) -> Begin:
    return tuple(x - y for x, y in zip(a, b, strict=True))
