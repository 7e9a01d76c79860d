"""A mesh as the lingvo cluster that layers ask for their devices."""

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
    """A cluster of one process whose devices, or those of its workers, are those of a mesh.

    A layer of lingvo runs on one device, so a stage uses the first device of its home, or, where
    the layout splits the batch, one for each replica. Layers with named dims use them all. What
    asks for a device by number, as lingvo's layers do, gets the first device of the stage of that
    number; numbers start again after the last stage, as in any cluster of lingvo.
    """

    @classmethod
    def Params(cls) -> Any:
        """Adds the mesh and the layout."""
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
        """The mesh."""
        return self.params.mesh

    @property
    def layout(self) -> LayoutRules:
        """Which axes the batch and other dims are split over."""
        return self.params.layout

    def WorkerDeviceInModelSplit(self, device_index: int) -> str:
        """The first device of a stage.

        Args:
            device_index: the number of the stage.
        """
        return self.device(self.mesh.stage_processors(device_index % self.mesh.num_stages)[0])

    def device(self, processor: int) -> str:
        """The device of a processor of the mesh."""
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
    """The lingvo cluster of one process whose model split is the mesh.

    To be entered with `with`; `WorkerDeviceInModelSplit(i)` is then the first device of
    `mesh.stage_processors(i)`. A layout `batch:data` gives each stage a replica for each place
    along the axis `data`. Layers with named dims are split over other axes by further rules, layers
    of lingvo are not. Devices along axes that no rule names idle, which is a warning.

    Args:
        mesh: the mesh; all its devices belong to this process, or to workers that it drives
            (`pipemesh.backend.cluster`): to all of them as many, if they have as many.
        device_type: `CPU` or `GPU`.
        do_eval: whether layers run in evaluation mode.
        layout: rules for the dim `batch` and for those of layers with named dims, or none.
        lowering: of the stacks inside; `simd` lets dims of what all devices compute together be
            split over the axis `layers`, as `vocab:layers`.

    Raises:
        DeviceError: there are fewer logical devices than the mesh has.
        LayoutError: the layout names no axis of the mesh, or one that cannot be split so.
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
        # lingvo reads its flags, and a program that is not absl's never parses them.
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
        # The batch is split over one axis at most.
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
    """Returns the device of each processor if there are workers, else none."""
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
    """Checks that stages can be split as a layout says, whatever dims they have.

    Args:
        mesh: the mesh.
        layout: the rules.
        lowering: of the stack.

    Raises:
        LayoutError: it names no axis of the mesh, or one that cannot be split so.
        MeshError: homes differ, and the lowering has one program for all.
    """
    if not isinstance(layout, LayoutRules):
        raise LayoutError(
            f"layout {layout!r} is no LayoutRules; write LayoutRules.from_text('batch:data')"
        )
    layout.check(mesh)
    check_axes(layout, lowering)
    check_uneven(mesh, layout, lowering)
