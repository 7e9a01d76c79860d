"""A mesh as a lingvo cluster, from which layers get their devices."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf
from absl import flags
from lingvo.core import cluster_factory

from pipemesh.backend.cluster import worker_devices
from pipemesh.backend.devices import MORE_DEVICES
from pipemesh.errors import DeviceError, LayoutError, MeshError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan.homes import check_axes, check_uneven, home_of, unused_axes, without
from pipemesh.plan.network import over_hosts


class MeshCluster(cluster_factory.Cluster):
    """A cluster of one process whose devices, or whose workers' devices, form a mesh.

    A lingvo layer runs on one device. So a stage uses the first device of its home, or one for each
    replica if the layout splits the batch. Layers with named dims use all devices.

    A layer that asks for a device by number gets the first device of that stage. Numbers wrap
    around after the last stage, as in any lingvo cluster.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines the mesh, the layout and the devices."""
        p = super().Params()
        p.Define("mesh", None, "The mesh; its processors are the devices of the process, in order.")
        p.Define("layout", LayoutRules(), "Which axes the batch and other dims are split over.")
        p.Define(
            "devices",
            (),
            "Of workers, one a processor; none if the process has its own.",
        )
        return p

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh."""
        return self.params.mesh

    @property
    def layout(self) -> LayoutRules:
        """Returns the layout rules for the batch and other dims."""
        return self.params.layout

    def WorkerDeviceInModelSplit(self, device_index: int) -> str:
        """Returns the first device of the stage with this number."""
        return self.device(self.mesh.stage_processors(device_index % self.mesh.num_stages)[0])

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

    Enter it with `with`. `WorkerDeviceInModelSplit(i)` is then the first device of
    `mesh.stage_processors(i)`. A layout `batch:data` gives each stage one replica for each position
    along the axis `data`. Further rules split layers with named dims over other axes; they do not
    split lingvo layers. Devices along axes without a rule idle, which gives a warning.

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
    check_layout(mesh, layout, lowering)
    used = [p for stage in range(mesh.num_stages) for p in home_of(mesh, layout, stage)]
    if len(used) < mesh.num_devices and LAYERS_AXIS not in mesh.axis_names:
        raise MeshError(
            f"mesh '{mesh}' has no axis 'layers', so all layers would run on its first device and "
            f"{mesh.num_devices - 1} devices would idle; name an axis 'layers', for example "
            f"'layers:{mesh.num_devices}'"
        )
    devices = _of_workers(mesh, layout, device_type)
    found = len(tf.config.list_logical_devices(device_type))
    if not devices and found < mesh.num_devices:
        raise DeviceError(
            f"mesh {mesh} needs {mesh.num_devices} {device_type} devices, but {found} exist. "
            f"{MORE_DEVICES}"
        )
    idle = [f"{device_type}:{i}" for i in range(mesh.num_devices) if i not in used]
    if idle:
        axes = unused_axes(mesh, layout)
        # At most one axis splits the batch.
        split = "" if layout.rules else f"split the batch with the layout 'batch:{axes[0]}', or "
        warnings.warn(
            f"mesh '{mesh}' has {mesh.num_devices} devices, but nothing is split "
            f"along {', '.join(axes)}: {', '.join(idle)} will idle. Use the mesh "
            f"'{without(mesh, axes)}', or {split}cut the layers into "
            f"{mesh.num_stages * mesh.num_devices // len(used)} stages",
            stacklevel=2,
        )
    params = MeshCluster.Params()
    for name, value in cluster_factory.Current().params.Copy().IterParams():
        if name != "cls" and name in params:
            params.Set(**{name: value})
    params.mesh, params.layout, params.devices = mesh, layout, devices
    params.mode = "sync"
    params.job = "trainer_client"
    params.do_eval = do_eval
    params.worker.name = "/job:localhost"
    params.worker.replicas = 1
    params.worker.cpus_per_replica = mesh.num_devices
    params.worker.gpus_per_replica = mesh.num_devices if device_type == "GPU" else 0
    params.worker.tpus_per_replica = 0
    params.worker.devices_per_split = mesh.num_devices
    return MeshCluster(params)


def _of_workers(mesh: Mesh, layout: LayoutRules, device_type: str) -> tuple[str, ...]:
    """Returns the device of each processor if there are workers, else an empty tuple."""
    devices = worker_devices(device_type)
    if not devices:
        return ()
    found = over_hosts(mesh, layout, list(map(len, devices)))
    for axis in found.crossing:
        warnings.warn(
            f"slices along the axis {axis!r} of mesh '{mesh}' lie on several workers, and what "
            "they exchange in every layer goes from host to host; give fewer workers more "
            f"devices, or more of the mesh to the axis 'layers' and less to {axis!r}",
            stacklevel=3,
        )
    if found.idle:
        names = ", ".join(map(str, found.idle))
        warnings.warn(
            f"mesh '{mesh}' has fewer devices than there are workers: worker {names} will idle; "
            "use a larger mesh, or fewer workers",
            stacklevel=3,
        )
    return tuple(devices[host][device] for host, device in found.places)


def check_layout(mesh: Mesh, layout: LayoutRules, lowering: str = "placement") -> None:
    """Checks that a layout can split stages, for any dims that they have."""
    if not isinstance(layout, LayoutRules):
        raise LayoutError(
            f"layout {layout!r} is no LayoutRules; write LayoutRules.from_text('batch:data')"
        )
    layout.check(mesh)
    check_axes(layout, lowering)
    check_uneven(mesh, layout, lowering)
