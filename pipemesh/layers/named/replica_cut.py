"""Weights cut over the replicas of a stage, each of which computes with whole weights."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout


@dataclasses.dataclass(frozen=True)
class ReplicaCut:
    """The rules for dims that are split over the axis of the batch.

    Weights with such a dim are stored in slices on the replicas (stage 3 of ZeRO). Activations are
    split over that axis by their batch dim.

    Attributes:
        mesh: the mesh of all replicas: first their axis, then the axes of each replica.
        rules: the rules for all dims but the batch's.
        devices: the devices of all replicas while weights are made, otherwise empty.

    Example:
        >>> cut = ReplicaCut(Mesh.from_text("data:2"), LayoutRules.from_text("embed:data"))
        >>> str(cut.layout(Shape.of(vocab=6, embed=4))), cut.layout(Shape.of(vocab=6))
        ('vocab:6;embed:4/data', None)
    """

    mesh: Mesh
    rules: LayoutRules
    devices: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """Returns the axis of the replicas."""
        return self.mesh.axis_names[0]

    def layout(self, shape: Shape) -> TensorLayout | None:
        """Returns the layout of a weight on the replicas, or None if it is not cut over them."""
        layout = self.rules.tensor_layout(shape, self.mesh)
        return layout if self.axis in layout.split_axes else None

    def size_elsewhere(self, shape: Shape) -> int:
        """Returns the number of elements of a weight that a replica gets from others."""
        if self.layout(shape) is None:
            return 0
        return shape.size - shape.size // self.mesh.size(self.axis)


_current: contextvars.ContextVar[ReplicaCut | None] = contextvars.ContextVar("cut", default=None)
_stays: contextvars.ContextVar[bool] = contextvars.ContextVar("stays", default=False)


@contextlib.contextmanager
def replica_cut_scope(cut: ReplicaCut | None) -> Iterator[None]:
    """Sets the cut over replicas with which named layers inside are made, called and counted.

    Args:
        cut: the cut, or None for none.
    """
    token = _current.set(cut)
    try:
        yield
    finally:
        _current.reset(token)


def current_replica_cut() -> ReplicaCut | None:
    """Returns the cut of the innermost scope, or None without a cut."""
    return _current.get()


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Keeps variables made inside on the device of the scope."""
    token = _stays.set(True)
    try:
        yield
    finally:
        _stays.reset(token)


def stays() -> bool:
    """Returns whether variables made now stay on the device of the scope."""
    return _stays.get()
