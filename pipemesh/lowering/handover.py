"""A tensor goes from the devices of one placement to those of another."""

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
    """What one device sends to one other.

    Attributes:
        source: the processor that sends it.
        target: the processor that gets it.
        begin: where it begins in the whole tensor.
        size: its sizes.
        in_source: where it begins in what the source holds.
        in_target: where it begins in what the target holds.
    """

    source: int
    target: int
    begin: Begin
    size: Begin
    in_source: Begin
    in_target: Begin


class Handover:
    """How a tensor comes from the layout that it has on some devices to that on others.

    Each part of it is sent once: from the first device that holds it to the first one that needs
    it, which copies it to others of its side. Gradients go the same way back. So between the two
    sides goes what the whole tensor has, whatever the layouts.

    Args:
        sender: the layout that it has.
        receiver: the layout that it gets, of the same shape on another mesh.

    Attributes:
        pieces: what is sent.

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
        """Cuts the pieces, each on the device that sends it.

        Args:
            slices: of the tensor, one for each processor of the sender.
            devices: of these.
        """

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Of each slice, copies too, the gradient, which the pieces of its holder make up."""
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
        # The call that the gradient is attached to has no device of its own.
        for number, piece in enumerate(self.pieces):
            with tf.device(devices[piece.source]):
                pieces[number] = tf.identity(pieces[number])
        return pieces

    def receive(self, pieces: Sequence[tf.Tensor], devices: Sequence[str]) -> Slices:
        """Joins the pieces, and copies what is equal on several devices.

        Args:
            pieces: as sent; in dims that are not split they may have any sizes.
            devices: of the receiver's processors.
        """

        def back(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            """Of each piece the gradient: each holder of a copy has the whole gradient."""
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
        """Those of the pieces that make up a slice, as one tensor on a device."""
        chosen = [
            (piece.begin, tensor)
            for piece, tensor, own in zip(self.pieces, tensors, mine, strict=True)
            if own
        ]
        with tf.device(device):
            return tf.identity(_join(chosen, 0))


def _cut(tensor: tf.Tensor, begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
    """A part of a tensor; all of it is handed on."""
    if static_sizes(tensor) == list(size):
        return tf.identity(tensor)
    return tf.slice(tensor, begin, size)


def _join(pieces: Sequence[tuple[Begin, tf.Tensor]], dim: int) -> tf.Tensor:
    """Pieces of a grid, by where they begin, joined along a dim and all after it."""
    if len(pieces) == 1:
        return pieces[0][1]
    rows: dict[int, list[tuple[Begin, tf.Tensor]]] = {}
    for begin, tensor in pieces:
        rows.setdefault(begin[dim], []).append((begin, tensor))
    parts = [_join(rows[begin], dim + 1) for begin in sorted(rows)]
    return parts[0] if len(parts) == 1 else tf.concat(parts, dim)


def _first_holders(layout: TensorLayout) -> list[int]:
    """For each processor the first one that holds the same part as it."""
    first: dict[Begin, int] = {}
    return [
        first.setdefault(layout.slice_begin(processor), processor)
        for processor in range(layout.mesh.num_devices)
    ]


def _end(layout: TensorLayout, processor: int) -> list[int]:
    return [part.stop for part in layout.slice_ranges(processor)]


def _minus(a: Sequence[int], b: Sequence[int]) -> Begin:
    return tuple(x - y for x, y in zip(a, b, strict=True))
