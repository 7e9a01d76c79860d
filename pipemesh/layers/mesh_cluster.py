"""The cluster of a mesh, and the homes of stages in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import flags
from lingvo.core import cluster_factory, hyperparams

from pipemesh.backend.cluster import worker_devices
from pipemesh.backend.devices import MORE_DEVICES
from pipemesh.errors import DeviceError, LayoutError, MeshError, PipelineError, PipemeshError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan.homes import (
    check_axes,
    check_no_idle_axis,
    check_uneven,
    home_of,
    num_replicas,
    unused_axes,
)
from pipemesh.plan.network import over_hosts
from pipemesh.recurrent import Home


class MeshCluster(cluster_factory.Cluster):
    """A cluster of one process whose devices, or whose workers' devices, form a mesh.

    A layer that asks for a device by number gets the first device of that stage. Numbers wrap
    around after the last stage, as in any lingvo cluster.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines the mesh, the layout and the devices."""
        p = super().Params()
        p.Define("mesh", None, "The mesh; its processors are the devices of the process, in order.")
        p.Define("layout", LayoutRules(), "Which axes the batch and other dims are split over.")
        p.Define("devices", (), "Of workers, one a processor; none if the process has its own.")
        return p

    def WorkerDeviceInModelSplit(self, device_index: int) -> str:
        """Returns the first device of the stage with this number."""
        mesh: Mesh = self.params.mesh
        return self.device(mesh.stage_processors(device_index % mesh.num_stages)[0])

    def device(self, processor: int) -> str:
        """Returns the device of a processor of the mesh."""
        if self.params.devices:
            return self.params.devices[processor]
        return str(self.available_devices.reshape([-1])[processor])


def mesh_cluster(
    mesh: Mesh,
    device_type: str = "CPU",
    do_eval: bool = False,
    layout: LayoutRules | None = None,
    lowering: str = "placement",
) -> Any:
    """Returns the lingvo cluster of one process whose model split is the mesh.

    Enter it with `with`. A layout `batch:data` gives each stage one replica for each position along
    the axis `data`. Further rules split layers with named dims, not lingvo layers. Devices along
    axes without a rule idle, which gives a warning.

    Args:
        mesh: the mesh. Its devices belong to this process, or in equal numbers to the workers that
            it drives (`pipemesh.backend.cluster`), if these have equal numbers.
        device_type: `CPU` or `GPU`.
        do_eval: whether layers run in evaluation mode.
        layout: rules for the dim `batch` and for the dims of layers with named dims, or None.
        lowering: the lowering of the stacks inside. With `simd`, dims of layers that all devices
            compute together may be split over the axis `layers`, as in `vocab:layers`.

    Returns:
        The cluster, a context manager.

    Raises:
        DeviceError: the mesh has more devices than there are logical devices.
        LayoutError: the layout names no axis of the mesh, or one that it cannot split.
        MeshError: the mesh has several devices and no axis `layers`.
        PlanError: workers have fewer devices than the mesh.

    Example:
        >>> cluster = mesh_cluster(Mesh.from_text("layers:1"))
        >>> cluster.WorkerDeviceInModelSplit(0)
        '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh {mesh!r} is no Mesh; write Mesh.from_text('layers:2')")
    if not flags.FLAGS.is_parsed():
        # lingvo reads its flags, and a program without absl never parses them.
        flags.FLAGS.mark_as_parsed()
    layout = LayoutRules() if layout is None else layout
    if not isinstance(layout, LayoutRules):
        raise LayoutError(
            f"layout {layout!r} is no LayoutRules; write LayoutRules.from_text('batch:data')"
        )
    _check_layout(mesh, layout, lowering)
    used = [p for stage in range(mesh.num_stages) for p in home_of(mesh, layout, stage)]
    if len(used) < mesh.num_devices and LAYERS_AXIS not in mesh.axis_names:
        raise MeshError(
            f"mesh '{mesh}' has no axis 'layers', so all layers would run on its first device and "
            f"{mesh.num_devices - 1} devices would idle; name an axis 'layers', for example "
            f"'layers:{mesh.num_devices}'"
        )
    devices = _of_workers(mesh, layout, device_type)
    available = len(tf.config.list_logical_devices(device_type))
    if not devices and available < mesh.num_devices:
        raise DeviceError(
            f"mesh {mesh} needs {mesh.num_devices} {device_type} devices, but {available} exist. "
            f"{MORE_DEVICES}"
        )
    if idle := [f"{device_type}:{i}" for i in range(mesh.num_devices) if i not in used]:
        axes = unused_axes(mesh, layout)
        # At most one axis splits the batch.
        split = "" if layout.rules else f"split the batch with the layout 'batch:{axes[0]}', or "
        warnings.warn(
            f"mesh '{mesh}' has {mesh.num_devices} devices, but nothing is split "
            f"along {', '.join(axes)}: {', '.join(idle)} will idle. Use the mesh "
            f"'{mesh.without(*axes)}', or {split}cut the layers into "
            f"{mesh.num_stages * mesh.num_devices // len(used)} stages",
            stacklevel=2,
        )
    params = MeshCluster.Params()
    current = cluster_factory.Current().params.Copy()
    hyperparams.CopyFieldsTo(current, params, ignore_unknown_keys=True)
    params.Set(mesh=mesh, layout=layout, devices=devices, do_eval=do_eval)
    params.Set(mode="sync", job="trainer_client")
    params.worker.Set(
        name="/job:localhost",
        replicas=1,
        cpus_per_replica=mesh.num_devices,
        gpus_per_replica=mesh.num_devices if device_type == "GPU" else 0,
        tpus_per_replica=0,
        devices_per_split=mesh.num_devices,
    )
    return MeshCluster(params)


def _of_workers(mesh: Mesh, layout: LayoutRules, device_type: str) -> tuple[str, ...]:
    """Returns the device of each processor if there are workers, else an empty tuple."""
    devices = worker_devices(device_type)
    if not devices:
        return ()
    placement = over_hosts(mesh, layout, list(map(len, devices)))
    for axis in placement.crossing:
        warnings.warn(
            f"slices along the axis {axis!r} of mesh '{mesh}' lie on several workers, and what "
            "they exchange in every layer goes from host to host; give fewer workers more "
            f"devices, or more of the mesh to the axis 'layers' and less to {axis!r}",
            stacklevel=3,
        )
    if placement.idle:
        names = ", ".join(map(str, placement.idle))
        warnings.warn(
            f"mesh '{mesh}' has fewer devices than there are workers: worker {names} will idle; "
            "use a larger mesh, or fewer workers",
            stacklevel=3,
        )
    return tuple(devices[host][device] for host, device in placement.places)


def _check_layout(mesh: Mesh, layout: LayoutRules, lowering: str) -> None:
    """Checks that a layout can split stages, for any dims that they have."""
    layout.check(mesh)
    check_axes(layout, lowering)
    check_uneven(mesh, layout, lowering)


def stage_homes(cluster: Any, places: Sequence[int], p: Any) -> list[Home]:
    """Returns the home of each stage, given its position along the axis `layers`.

    Positions wrap around after the end of the axis, and without a mesh always, as in lingvo.
    """
    mesh, rules = mesh_of(cluster, p)
    if mesh is None:
        return [Home((cluster.WorkerDeviceInModelSplit(place),)) for place in places]
    needed, available = len(set(places)), mesh.num_stages
    if needed > available and needed % available:
        raise PipelineError(
            f"{p.name}: {len(places)} stages need {needed} places along the axis 'layers', but "
            f"mesh '{mesh}' has {available}, and {needed} is no multiple of it, so some "
            f"devices would do more than others; cut the layers into {available} stages or a "
            f"multiple, or use 'layers:{needed}'"
        )
    devices = _devices(cluster, mesh, p.name)
    replicas = num_replicas(mesh, rules)
    return [
        Home(tuple(devices[p] for p in home_of(mesh, rules, place % available)), replicas)
        for place in places
    ]


def _devices(cluster: Any, mesh: Mesh, name: str) -> list[str]:
    """Returns the device of each processor of a mesh."""
    if isinstance(cluster, MeshCluster):
        return [cluster.device(processor) for processor in range(mesh.num_devices)]
    # lingvo's controller only makes the variables: one device is enough.
    if cluster.job != "controller" and cluster.num_devices_per_split < mesh.num_devices:
        raise PipelineError(
            f"{name}: mesh_shape '{mesh}' has {mesh.num_devices} processors, but the cluster's "
            f"model split has {cluster.num_devices_per_split} devices; use a smaller mesh, or "
            "give the cluster more (worker.devices_per_split, --worker_split_size)"
        )
    return [cluster.WorkerDeviceInModelSplit(i) for i in range(mesh.num_devices)]


def warn_of_places(cluster: Any, places: Sequence[int], p: Any) -> None:
    """Warns if devices idle, or if stages share a device against their schedule."""
    mesh, _ = mesh_of(cluster, p)
    if mesh is None:
        return
    needed, available = len(set(places)), mesh.num_stages
    if available > needed:
        warnings.warn(
            f"{p.name}: mesh '{mesh}' has {available} places along the axis 'layers', but "
            f"its {len(places)} stages lie on {needed}: the other devices idle; cut the layers "
            f"into {available} stages or use 'layers:{needed}'",
            stacklevel=5,
        )
    if needed > available > 1 and getattr(p, "pipelined", False):
        warnings.warn(
            f"{p.name}: mesh '{mesh}' has {available} places along the axis 'layers', but the "
            f"schedule has {needed} devices: each place takes {needed // available} in turn; use a "
            f"schedule with several stages a device, such as 'looped_bfs:{needed // available}', "
            f"or 'layers:{needed}'",
            stacklevel=5,
        )


def mesh_devices(cluster: Any, mesh: Mesh, p: Any) -> list[str]:
    """Returns the device of each processor of a mesh whose devices all compute together."""
    cluster_mesh, _ = mesh_of(cluster, p)
    if cluster_mesh is not None and cluster_mesh != mesh:
        raise PipelineError(
            f"{p.name}: its stages are to lie on mesh '{mesh}', each on devices of its own, but "
            f"'{cluster_mesh}' is there; make the axis 'layers' as long as the schedule has "
            "devices (looped_bfs:2 has two stages a device), and call the stack under the mesh "
            "that it was made under"
        )
    return _devices(cluster, mesh, p.name)


def mesh_of(cluster: Any, p: Any) -> tuple[Mesh | None, LayoutRules]:
    """Returns the mesh and the rules of a stack: those of its params, else those of the cluster.

    The mesh is None if neither has one: then each stage is on one device.
    """
    mesh, rules = None, LayoutRules()
    if isinstance(cluster, MeshCluster):
        mesh, rules = cluster.params.mesh, cluster.params.layout
    try:
        requested = None if p.mesh_shape is None else Mesh.from_text(p.mesh_shape)
        requested_rules = None if p.layout is None else LayoutRules.from_text(p.layout)
        if mesh is not None and requested not in (None, mesh):
            raise PipelineError(
                f"mesh_shape is '{requested}', but the cluster that is entered has the mesh "
                f"'{mesh}'; give one of them"
            )
        if mesh is not None and requested_rules not in (None, rules):
            raise PipelineError(
                f"layout is '{requested_rules}', but the cluster that is entered has '{rules}'; "
                "give one of them"
            )
        mesh, rules = requested or mesh, requested_rules or rules
        if mesh is None and rules.rules:
            raise PipelineError(
                f"layout is '{rules}', but there is no mesh; set mesh_shape, for example to "
                "'layers:2;data:2'"
            )
        if mesh is not None:
            # Only a pipelined stack with its loss inside may be one program.
            is_one_program = getattr(p, "pipelined", False) and p.loss_inside
            _check_layout(mesh, rules, p.lowering if is_one_program else "placement")
        # A cluster's own mesh has already warned of idle devices.
        if requested is not None and not p.allow_idle and not isinstance(cluster, MeshCluster):
            check_no_idle_axis(requested, rules)
    except PipemeshError as error:
        raise type(error)(f"{p.name}: {error}") from error
    return mesh, rules
