"""The processors that own a stage, and the axes that divide a stage among them."""

from __future__ import annotations

from pipemesh.errors import LayoutError, MeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.text import did_you_mean

# The batch dim, which every stack has: the rows of its inputs; and the positions in a row.
BATCH, LENGTH = "batch", "length"


def check_axes(layout: LayoutRules, lowering: str = "placement") -> None:
    """Checks that a layout does not split stages over `layers`; under `simd` other dims may."""
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
    """Checks that a lowering and layout support homes of different sizes."""
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
    """Returns the number of replicas: the size of the axis that splits the batch."""
    axis = layout.axis(BATCH)
    return 1 if axis is None else mesh.size(axis)


def replica_axis(mesh: Mesh, layout: LayoutRules) -> tuple[str, int] | None:
    """Returns the axis that splits the batch, with its size; None for one replica."""
    axis, number = layout.axis(BATCH), num_replicas(mesh, layout)
    return None if axis is None or number == 1 else (axis, number)


def cut_rules(layout: LayoutRules) -> LayoutRules:
    """Returns the rules that split weights over the axis of the batch."""
    axis = layout.axis(BATCH)
    rules = ((dim, split) for dim, split in layout.rules if dim != BATCH and split == axis)
    return LayoutRules(tuple(rules))


def inner_axes(mesh: Mesh, layout: LayoutRules) -> list[str]:
    """Returns the axes that split dims inside a replica, in the order of the mesh."""
    used = {axis for _, axis in inner_rules(layout).rules}
    return [name for name in mesh.axis_names if name in used]


def inner_mesh(mesh: Mesh, layout: LayoutRules, place: int = 0) -> Mesh | None:
    """Returns the sub-mesh of a replica at an index along `layers`; None without inner axes."""
    axes, of_place = inner_axes(mesh, layout), mesh.place_mesh(place)
    return Mesh(tuple((name, of_place.size(name)) for name in axes)) if axes else None


def inner_rules(layout: LayoutRules) -> LayoutRules:
    """Returns the rules that split dims inside a replica."""
    outside = (LAYERS_AXIS, layout.axis(BATCH))
    return LayoutRules(tuple((dim, axis) for dim, axis in layout.rules if axis not in outside))


def home_of(mesh: Mesh, layout: LayoutRules, place: int) -> list[int]:
    """Returns the processors of a home at an index along `layers`, replica after replica."""
    # Within a replica they are in the order of its axes. Of processors that differ only along
    # unused axes, the first one counts.
    order = [name for name in [layout.axis(BATCH)] if name is not None]
    order += inner_axes(mesh, layout)
    at = {p: mesh.coordinates(p) for p in mesh.stage_processors(place)}
    idle = [name for name in mesh.axis_names if name not in (LAYERS_AXIS, *order)]
    used = [p for p in at if not any(at[p][name] for name in idle)]
    return sorted(used, key=lambda p: [at[p][name] for name in order])


def unused_axes(mesh: Mesh, layout: LayoutRules) -> list[str]:
    """Returns axes other than `layers`, longer than 1, that no rule uses."""
    used = {axis for _, axis in layout.rules}
    return [
        name for name, size in mesh.axes if size != 1 and name != LAYERS_AXIS and name not in used
    ]


def check_no_idle_axis(mesh: Mesh, layout: LayoutRules) -> None:
    """Checks that a rule uses each axis other than `layers`."""
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
