"""The lowering that layers run under, and the values with named dims that it makes."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pipemesh.backend.structure import setting
from pipemesh.errors import LayoutError
from pipemesh.lowering import Lowering, PlacementLowering, Tensor, ops
from pipemesh.mesh import LayoutRules, Mesh, Shape

_current: contextvars.ContextVar[Lowering | None] = contextvars.ContextVar(
    "pipemesh_lowering", default=None
)


def lowering_scope(lowering: Lowering) -> contextlib.AbstractContextManager[Lowering]:
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
    return setting(_current, lowering)


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


T = TypeVar("T")


def map_kind(kind: type[T] | tuple[type[T], ...], function: Callable[[T], Any], value: Any) -> Any:
    """Applies a function to each value of a kind, nested in lists, tuples and dicts."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        new: Any = type(value)()
        for key in value:
            new[key] = map_kind(kind, function, value[key])
        return new
    if isinstance(value, (list, tuple)):
        parts = [map_kind(kind, function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def exported(value: Any) -> Any:
    """Joins tensors with named dims in a value on the first device of their lowering."""
    return map_kind(Tensor, ops.export_tensor, value)


_PREFIX = "unnamed_"


def unnamed(sizes: Sequence[int], batch_dim: int, batch: str = "batch") -> Shape:
    """Returns a shape in which only the batch dim has a name that a layout may use."""
    names = [batch if i == batch_dim else f"{_PREFIX}{i}" for i in range(len(sizes))]
    return Shape.of(**dict(zip(names, sizes, strict=True)))


def is_unnamed(shape: Shape) -> bool:
    """Returns whether a shape is a result of `unnamed` with other dims than the batch's."""
    return any(name.startswith(_PREFIX) for name in shape.names)
