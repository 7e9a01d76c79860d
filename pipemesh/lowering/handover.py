"""Transfer of a tensor from the devices of one placement to those of another."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.backend.static_shape import static_sizes
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import TensorLayout

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
