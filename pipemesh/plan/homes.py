"""The processors that own a stage, and the axes that divide a stage among them."""

from __future__ import annotations

from collections.abc import Sequence

from pipemesh.errors import LayoutError, MeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.text import did_you_mean

# The dim of a layout that every stack has: the rows of its inputs.
BATCH = "batch"


def check_axes(layout: LayoutRules, lowering: str = "placement") -> None:
    """Checks that stages can be split over the axes that a layout names.

    Args:
        layout: the rules.
        lowering: of the plan. Under `simd` all devices compute what stands before and behind the
            stages, so dims of that may be split over the axis `layers`, too.

    Raises:
        LayoutError: the batch is split over the axis along which the stages lie, or another dim
            over that axis.
    """
    if layout.axis(BATCH) == LAYERS_AXIS:
        raise LayoutError(
            f"layout '{layout}' splits the batch over the axis 'layers', along which the stages "
            "lie; split the batch over another axis of the mesh, for example 'batch:data' on "
            "'layers:2;data:2'"
        )
    for dim, axis in layout.rules:
        if dim != BATCH and axis == LAYERS_AXIS and lowering != "simd":
            raise LayoutError(
                f"layout '{layout}' splits the dim {dim!r} over the axis 'layers', along which the "
                "stages lie; inside of a stage dims are split over the other axes: give it one of "
                f"its own, for example '{dim}:model' on 'layers:2;data:2;model:2'"
            )


def check_uneven(mesh: Mesh, layout: LayoutRules, lowering: str = "placement") -> None:
    """Checks that homes may differ as those of a mesh do; see `Mesh.place_mesh`.

    Args:
        mesh: the mesh.
        layout: its rules.
        lowering: of the plan.

    Raises:
        LayoutError: the batch, or weights with it, are split over axes of homes that differ.
        MeshError: homes differ, and the lowering has one program for all.
    """
    if mesh.is_even:
        return
    if lowering != "placement":
        raise MeshError(
            f"mesh '{mesh}' has homes of different sizes, but lowering='{lowering}' is one program "
            "for all devices; give each axis one size, or use lowering='placement'"
        )
    axis = layout.axis(BATCH)
    if axis is not None and not isinstance(dict(mesh.axes).get(axis, 1), int):
        raise LayoutError(
            f"the batch is split over the axis {axis!r}, which has several sizes in mesh '{mesh}', "
            "but all stages have as many replicas; give this axis one size, and several to axes "
            "that other dims are split over"
        )
    if (cut := cut_rules(layout)).rules:
        raise LayoutError(
            f"rule '{cut}' cuts weights over the axis that the batch is split over, for which the "
            f"homes of all stages are of one size, but those of mesh '{mesh}' are not; leave the "
            "rule out, or give each axis one size"
        )


def num_replicas(mesh: Mesh, layout: LayoutRules) -> int:
    """Over how many places the batch is split."""
    axis = layout.axis(BATCH)
    return 1 if axis is None else mesh.size(axis)


def replica_axis(mesh: Mesh, layout: LayoutRules) -> tuple[str, int] | None:
    """The axis that the batch is split over, with its size; None if there is one replica."""
    axis, number = layout.axis(BATCH), num_replicas(mesh, layout)
    return None if axis is None or number == 1 else (axis, number)


def cut_rules(layout: LayoutRules) -> LayoutRules:
    """The rules for dims that are split as the batch is: weights that have them are cut so.

    Example:
        >>> str(cut_rules(LayoutRules.from_text("batch:data;embed:data;d_ff:model")))
        'embed:data'
    """
    axis = layout.axis(BATCH)
    return LayoutRules(tuple((dim, of) for dim, of in layout.rules if dim != BATCH and of == axis))


def inner_axes(mesh: Mesh, layout: LayoutRules) -> list[str]:
    """The axes over which dims are split inside of a replica, in the order of the mesh."""
    used = {axis for _, axis in inner_rules(layout).rules}
    return [name for name in mesh.axis_names if name in used]


def inner_mesh(mesh: Mesh, layout: LayoutRules, place: int = 0) -> Mesh | None:
    """The sub-mesh of a replica; None if nothing but the batch is split.

    Args:
        mesh: the mesh.
        layout: its rules.
        place: of the stage along the axis `layers`; it matters where homes differ.
    """
    axes, of_place = inner_axes(mesh, layout), mesh.place_mesh(place)
    return Mesh(tuple((name, of_place.size(name)) for name in axes)) if axes else None


def inner_rules(layout: LayoutRules) -> LayoutRules:
    """The rules for what is split inside of a replica."""
    outside = (LAYERS_AXIS, layout.axis(BATCH))
    return LayoutRules(tuple((dim, axis) for dim, axis in layout.rules if axis not in outside))


def home_of(mesh: Mesh, layout: LayoutRules, place: int) -> list[int]:
    """The processors that run a stage: those of its first replica, of its second, and so on.

    Args:
        mesh: the mesh.
        layout: its rules.
        place: of the stage along the axis `layers`.

    Returns:
        Within a replica in the order of the axes that its dims are split over. Of processors that
        differ in axes only over which nothing is split there is the first.

    Example:
        >>> mesh = Mesh.from_text("layers:2;model:2;data:2")
        >>> home_of(mesh, LayoutRules.from_text("batch:data"), 1)
        [4, 5]
        >>> home_of(mesh, LayoutRules.from_text("batch:data;d_ff:model"), 1)
        [4, 6, 5, 7]
    """
    order = [name for name in [layout.axis(BATCH)] if name is not None]
    order += inner_axes(mesh, layout)
    at = {p: mesh.coordinates(p) for p in mesh.stage_processors(place)}
    idle = [name for name in mesh.axis_names if name not in (LAYERS_AXIS, *order)]
    used = [p for p in at if not any(at[p][name] for name in idle)]
    return sorted(used, key=lambda p: [at[p][name] for name in order])


def without(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """The mesh without some of its axes."""
    return Mesh(tuple(axis for axis in mesh.axes if axis[0] not in axes))


def unused_axes(mesh: Mesh, layout: LayoutRules) -> list[str]:
    """Axes of several places, other than `layers`, over which the layout splits nothing."""
    used = {axis for _, axis in layout.rules}
    return [
        name for name, size in mesh.axes if size != 1 and name != LAYERS_AXIS and name not in used
    ]


def check_no_idle_axis(mesh: Mesh, layout: LayoutRules) -> None:
    """Checks that something is split over each axis other than `layers`.

    Raises:
        PlanError: over one there is nothing.
    """
    unused = unused_axes(mesh, layout)
    if not unused:
        return
    has_layers = LAYERS_AXIS in mesh.axis_names
    hint = "" if has_layers else did_you_mean(unused[0], [LAYERS_AXIS])
    rule = f"add a rule such as 'batch:{unused[0]}' to the layout, "
    if layout.axis(BATCH) is not None or not isinstance(dict(mesh.axes)[unused[0]], int):
        rule = ""
    raise PlanError(
        f"nothing is split over the axis {unused[0]!r} of mesh '{mesh}', so its devices would idle "
        f"or compute the same; {hint}{rule}leave the axis out, or set allow_idle"
    )
