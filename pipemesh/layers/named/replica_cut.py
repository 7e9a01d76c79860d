"""How weights are cut over the replicas of a stage, each of which computes with whole ones."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout


@dataclasses.dataclass(frozen=True)
class ReplicaCut:
    """The rules for dims that are split over the axis that the batch is split over.

    Weights that have such a dim lie in slices on the replicas (stage 3 of ZeRO); activations,
    which have the batch's dim, are split over that axis by their rows.

    Attributes:
        mesh: of all replicas: the axis that they lie along, then those of each replica.
        rules: for all dims but the batch's.
        devices: of all replicas, where weights are made; none where they are there already.

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
        """The axis that the replicas lie along."""
        return self.mesh.axis_names[0]

    def layout(self, shape: Shape) -> TensorLayout | None:
        """How a weight lies on the replicas; None if it is not cut over them.

        Raises:
            LayoutError: it cannot be cut as the rules say.
        """
        layout = self.rules.tensor_layout(shape, self.mesh)
        return layout if self.axis in layout.split_axes else None

    def size_elsewhere(self, shape: Shape) -> int:
        """How many elements of a weight lie on other replicas than the one that computes."""
        if self.layout(shape) is None:
            return 0
        return shape.size - shape.size // self.mesh.size(self.axis)


_current: contextvars.ContextVar[ReplicaCut | None] = contextvars.ContextVar("cut", default=None)
_stays: contextvars.ContextVar[bool] = contextvars.ContextVar("stays", default=False)


@contextlib.contextmanager
def replica_cut_scope(cut: ReplicaCut | None) -> Iterator[None]:
    """Named layers inside are made, called and counted with weights that are cut over replicas.

    Args:
        cut: how; None if they are not.
    """
    token = _current.set(cut)
    try:
        yield
    finally:
        _current.reset(token)


def current_replica_cut() -> ReplicaCut | None:
    """The cut of the innermost scope; None if weights are not cut over replicas."""
    return _current.get()


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Variables that are made inside belong to the replica whose device the scope says."""
    token = _stays.set(True)
    try:
        yield
    finally:
        _stays.reset(token)


def stays() -> bool:
    """Whether a variable that is made now belongs to a replica already."""
    return _stays.get()
