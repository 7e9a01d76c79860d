"""The scope of the lowering that named layers are made and called with."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

from pipemesh.errors import LayoutError
from pipemesh.lowering import Lowering, PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh

_current: contextvars.ContextVar[Lowering | None] = contextvars.ContextVar(
    "pipemesh_lowering", default=None
)


@contextlib.contextmanager
def lowering_scope(lowering: Lowering) -> Iterator[Lowering]:
    """Makes and calls named layers inside with a lowering; scopes nest.

    Args:
        lowering: the lowering, whose layout rules split the dims of weights and activations.

    Raises:
        LayoutError: it is not a lowering.

    Example:
        >>> from pipemesh.layers.named import current_lowering, lowering_scope
        >>> from pipemesh.lowering import PlacementLowering
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> rules = LayoutRules.from_text("d_ff:model")
        >>> lowering = PlacementLowering(Mesh.from_text("model:2"), rules, ["CPU:0", "CPU:0"])
        >>> with lowering_scope(lowering):
        ...     str(current_lowering().mesh)
        'model:2'
    """
    if not isinstance(lowering, Lowering):
        raise LayoutError(
            f"{lowering!r} is no lowering; give one such as PlacementLowering(mesh, rules, devices)"
        )
    token = _current.set(lowering)
    try:
        yield lowering
    finally:
        _current.reset(token)


def current_lowering() -> Lowering:
    """Returns the lowering of the innermost scope.

    Outside all scopes it is a single processor, whose device TensorFlow chooses in a graph. A
    `tf.device` around the layer overrides it, as for any layer.

    Example:
        >>> current_lowering().mesh.num_devices
        1
    """
    return _current.get() or _alone()


@functools.cache
def _alone() -> Lowering:
    # The device name is empty, so the scopes around it, or TensorFlow, decide.
    return PlacementLowering(Mesh.from_text("model:1"), LayoutRules(), [""])
