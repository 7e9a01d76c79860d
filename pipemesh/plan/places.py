"""Which processors of a mesh run what is split over the batch alone."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.errors import LayoutError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS

# The dim of a layout that every stack has: the rows of its inputs.
BATCH = "batch"


def check_batch_axis(layout: LayoutRules) -> None:
    """Checks that the batch is not split over the axis along which the stages lie.

    Raises:
        LayoutError: it is.
    """
    if layout.axis(BATCH) == LAYERS_AXIS:
        raise LayoutError(
            f"layout '{layout}' splits the batch over the axis 'layers', along which the stages "
            "lie; split the batch over another axis of the mesh, for example 'batch:data' on "
            "'layers:2;data:2'"
        )


def num_replicas(mesh: Mesh, layout: LayoutRules) -> int:
    """Over how many places the batch is split."""
    axis = layout.axis(BATCH)
    return 1 if axis is None else mesh.size(axis)


def replicas_of(mesh: Mesh, layout: LayoutRules, place: int) -> list[int]:
    """The processors that run a stage whose dims are split over no axis but the batch's.

    Args:
        mesh: the mesh.
        layout: its rules; those for other dims than the batch do not count.
        place: of the stage along the axis `layers`.

    Returns:
        One for each part of a microbatch: the first of those that differ in other axes only.

    Example:
        >>> mesh = Mesh.from_text("layers:2;data:2;model:2")
        >>> replicas_of(mesh, LayoutRules.from_text("batch:data"), 1)
        [4, 6]
    """
    processors = mesh.stage_processors(place)
    others = [name for name in mesh.stage_mesh.axis_names if name != layout.axis(BATCH)]
    return [p for p in processors if not any(mesh.coordinates(p)[name] for name in others)]


def without(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The mesh without some of its axes."""
    return Mesh(tuple(axis for axis in mesh.axes if axis[0] not in axes))


def unused_axes(mesh: Mesh, layout: LayoutRules) -> list[str]:
    """Axes of several places, other than `layers`, over which the layout splits nothing."""
    used = {axis for _, axis in layout.rules}
    return [name for name, size in mesh.stage_mesh.axes if size > 1 and name not in used]


def check_no_idle_axis(mesh: Mesh, layout: LayoutRules) -> None:
    """Checks that something is split over each axis other than `layers`.

    Raises:
        PlanError: over one there is nothing.
    """
    unused = unused_axes(mesh, layout)
    if not unused:
        return
    rule = f"add a rule such as 'batch:{unused[0]}' to the layout, "
    if layout.axis(BATCH) is not None:
        rule = ""
    raise PlanError(
        f"nothing is split over the axis {unused[0]!r} of mesh '{mesh}', so its devices would idle "
        f"or compute the same; {rule}leave the axis out, or set allow_idle"
    )
