"""The homes of the stages of a stack."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pipemesh.errors import PipelineError, PipemeshError
from pipemesh.layers.mesh_cluster import MeshCluster, check_layout
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.homes import check_no_idle_axis, home_of, num_replicas
from pipemesh.recurrent import Home


def stage_homes(cluster: Any, places: Sequence[int], p: Any) -> list[Home]:
    """Returns the home of each stage, given its position along the axis `layers`.

    If there are more positions than the axis has, they wrap around. A cluster without a mesh always
    wraps around, as in lingvo.

    Raises:
        PipelineError: the number of positions exceeds the axis `layers` and is no multiple of it,
            or the cluster has another mesh.
        PipemeshError: see `mesh_of`.
    """
    name = p.name
    mesh, rules = mesh_of(cluster, p)
    if mesh is None:
        return [Home((cluster.WorkerDeviceInModelSplit(place),)) for place in places]
    needed, there = len(set(places)), mesh.num_stages
    if needed > there and needed % there:
        raise PipelineError(
            f"{name}: {len(places)} stages need {needed} places along the axis 'layers', but "
            f"mesh '{mesh}' has {there}, and {needed} is no multiple of it, so some "
            f"devices would do more than others; cut the layers into {there} stages or a "
            f"multiple, or use 'layers:{needed}'"
        )
    if isinstance(cluster, MeshCluster):
        device = cluster.device
    else:
        device = cluster.WorkerDeviceInModelSplit
        # lingvo's controller only makes the variables: one device is enough.
        computes = cluster.job != "controller"
        if computes and cluster.num_devices_per_split < mesh.num_devices:
            raise PipelineError(
                f"{name}: mesh_shape '{mesh}' has {mesh.num_devices} processors, but the cluster's "
                f"model split has {cluster.num_devices_per_split} devices; use a smaller mesh, or "
                "give the cluster more (worker.devices_per_split, --worker_split_size)"
            )
    replicas = num_replicas(mesh, rules)
    return [
        Home(tuple(device(p) for p in home_of(mesh, rules, place % there)), replicas)
        for place in places
    ]


def warn_of_places(cluster: Any, places: Sequence[int], p: Any) -> None:
    """Warns if devices idle, or if stages share a device against their schedule."""
    mesh, _ = mesh_of(cluster, p)
    if mesh is None:
        return
    needed, there = len(set(places)), mesh.num_stages
    if there > needed:
        warnings.warn(
            f"{p.name}: mesh '{mesh}' has {there} places along the axis 'layers', but "
            f"its {len(places)} stages lie on {needed}: the other devices idle; cut the layers "
            f"into {there} stages or use 'layers:{needed}'",
            stacklevel=5,
        )
    if needed > there > 1 and getattr(p, "pipelined", False):
        warnings.warn(
            f"{p.name}: mesh '{mesh}' has {there} places along the axis 'layers', but the schedule "
            f"has {needed} devices: each place takes {needed // there} in turn; use a schedule "
            f"with several stages a device, such as 'looped_bfs:{needed // there}', or "
            f"'layers:{needed}'",
            stacklevel=5,
        )


def mesh_devices(cluster: Any, mesh: Mesh, p: Any) -> list[str]:
    """Returns the device of each processor of a mesh whose devices all compute together.

    Raises:
        PipelineError: the cluster has another mesh, or fewer devices.
        PipemeshError: see `mesh_of`.
    """
    there, _ = mesh_of(cluster, p)
    if there is not None and there != mesh:
        raise PipelineError(
            f"{p.name}: its stages are to lie on mesh '{mesh}', each on devices of its own, but "
            f"'{there}' is there; make the axis 'layers' as long as the schedule has devices "
            "(looped_bfs:2 has two stages a device), and call the stack under the mesh that it was "
            "made under"
        )
    if isinstance(cluster, MeshCluster):
        return [cluster.device(processor) for processor in range(mesh.num_devices)]
    if cluster.job != "controller" and cluster.num_devices_per_split < mesh.num_devices:
        raise PipelineError(
            f"{p.name}: mesh '{mesh}' has {mesh.num_devices} processors, but the cluster's model "
            f"split has {cluster.num_devices_per_split} devices; use a smaller mesh, or give the "
            "cluster more (worker.devices_per_split, --worker_split_size)"
        )
    return [cluster.WorkerDeviceInModelSplit(i) for i in range(mesh.num_devices)]


def mesh_of(cluster: Any, p: Any) -> tuple[Mesh | None, LayoutRules]:
    """Returns the mesh of a stack, and its rules.

    In the params, `mesh_shape` is a mesh as text whose processors are the devices of the cluster's
    model split, in order. None means the cluster's mesh. `layout` are the rules as text, and None
    means those of the cluster. `allow_idle` allows unused axes in `mesh_shape`.

    The mesh is None if neither has one: then each stage is on one device.

    Raises:
        PipelineError: the cluster has another mesh, or there is a layout without a mesh.
        LayoutError: the layout fits neither the mesh nor lingvo layers.
        MeshError: `mesh_shape` is malformed.
        PlanError: devices would idle.
    """
    mesh, rules = None, LayoutRules()
    mesh_shape, layout = p.mesh_shape, p.layout
    if isinstance(cluster, MeshCluster):
        mesh, rules = cluster.mesh, cluster.layout
    try:
        asked = None if mesh_shape is None else Mesh.from_text(mesh_shape)
        asked_rules = None if layout is None else LayoutRules.from_text(layout)
        if mesh is not None and asked not in (None, mesh):
            raise PipelineError(
                f"mesh_shape is '{asked}', but the cluster that is entered has the mesh '{mesh}'; "
                "give one of them"
            )
        if mesh is not None and asked_rules not in (None, rules):
            raise PipelineError(
                f"layout is '{asked_rules}', but the cluster that is entered has '{rules}'; give "
                "one of them"
            )
        mesh, rules = asked or mesh, asked_rules or rules
        if mesh is None and rules.rules:
            raise PipelineError(
                f"layout is '{rules}', but there is no mesh; set mesh_shape, for example to "
                "'layers:2;data:2'"
            )
        if mesh is not None:
            check_layout(mesh, rules, _lowering(p))
        # A cluster's own mesh has already warned of idle devices.
        if asked is not None and not p.allow_idle and not isinstance(cluster, MeshCluster):
            check_no_idle_axis(asked, rules)
    except PipemeshError as error:
        raise type(error)(f"{p.name}: {error}") from error
    return mesh, rules


def _lowering(p: Any) -> str:
    """Returns the lowering that decides whether `layers` may split dims.

    Only a pipelined stack with the loss inside may do so.
    """
    is_one_program = getattr(p, "pipelined", False) and p.loss_inside
    return p.lowering if is_one_program else "placement"
