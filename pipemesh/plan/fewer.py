"""A plan for fewer devices: what a training goes on with when some of them are lost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan.places import BATCH
from pipemesh.plan.plan import Plan


def fewer(plan: Plan, devices: int, check: Callable[[Plan], object] = lambda plan: None) -> Plan:
    """The plan that is nearest to another one and needs no more than so many devices.

    Axes become shorter, and none longer. What is split over an axis other than `layers` divided by
    its size, so its new size divides the old one. Of all meshes the one with the most devices is
    taken, and of these the one that holds least on a device: replicas of the batch go first, then
    stages. Boundaries are for a number of stages, and go with it.

    Args:
        plan: the plan.
        devices: how many there are.
        check: raises a `PipemeshError` for a plan that the model cannot have; the next one is tried
            then.

    Returns:
        The plan, or the given one where that has no more devices.

    Raises:
        PlanError: there is none.

    Example:
        >>> str(fewer(Plan("layers:2;data:2", "batch:data", num_microbatches=4), 3))
        'mesh=layers:2;data:1 layout=batch:data num_microbatches=4'
        >>> str(fewer(Plan("layers:4", num_microbatches=4), 3))
        'mesh=layers:3 num_microbatches=4'
    """
    if plan.mesh.num_devices <= devices:
        return plan
    if not plan.mesh.is_even:
        raise PlanError(
            f"mesh={plan.mesh}: its places have {plan.mesh.num_devices} devices of their own, and "
            f"{devices} are left; such a mesh is not made smaller, so give another one"
        )
    why = ""
    for mesh in _smaller(plan.mesh, plan.layout, devices):
        try:
            found = _with_mesh(plan, mesh)
            check(found)
        except PipemeshError as error:
            why = why or f"; with mesh={mesh}: {error}"
            continue
        return found
    raise PlanError(
        f"mesh={plan.mesh}: it has {plan.mesh.num_devices} devices, {devices} are left, and no "
        f"smaller mesh goes with the rest of the plan{why}"
    )


def _with_mesh(plan: Plan, mesh: Mesh) -> Plan:
    if isinstance(plan.schedule, str):
        kept = plan.boundaries if mesh.num_stages == plan.mesh.num_stages else None
        return dataclasses.replace(plan, mesh=mesh, boundaries=kept)
    # A table is for one number of homes.
    if mesh.num_stages != plan.mesh.num_stages:
        raise PlanError(f"the table of the schedule is for {plan.mesh.num_stages} places")
    return dataclasses.replace(plan, mesh=mesh)


def _smaller(mesh: Mesh, layout: LayoutRules, devices: int) -> Iterator[Mesh]:
    """Meshes with shorter axes, the best first."""
    batch = layout.axis(BATCH)
    sizes = [
        [size for size in range(1, most + 1) if name == LAYERS_AXIS or most % size == 0]
        for name, most in zip(mesh.axis_names, mesh.shape, strict=True)
    ]
    found: list[tuple[int, int, int, Mesh]] = []
    for shape in itertools.product(*sizes):
        if (count := math.prod(shape)) > devices:
            continue
        axes = tuple(zip(mesh.axis_names, shape, strict=True))
        replicas = math.prod(size for name, size in axes if name == batch)
        found.append((-count, replicas, -dict(axes).get(LAYERS_AXIS, 1), Mesh(axes)))
    return (each[-1] for each in sorted(found, key=lambda each: each[:-1]))
