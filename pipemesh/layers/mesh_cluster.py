"""A mesh as the lingvo cluster that layers ask for their devices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import cluster_factory

from pipemesh.errors import DeviceError, MeshError, PipelineError
from pipemesh.mesh import Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS


class MeshCluster(cluster_factory.Cluster):
    """A cluster of one process whose devices are those of a mesh.

    A layer of lingvo runs on one device, so a stage uses the first device of its home. What asks
    for a device by number, as lingvo's layers do, gets the device of the stage of that number;
    numbers start again after the last stage, as in any cluster of lingvo.
    """

    @classmethod
    def Params(cls) -> Any:
        """Adds the mesh."""
        p = super().Params()
        p.Define("mesh", None, "The mesh; its processors are the devices of the process, in order.")
        return p

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.params.mesh

    def WorkerDeviceInModelSplit(self, device_index: int) -> str:
        """The first device of a stage.

        Args:
            device_index: the number of the stage.
        """
        mesh = self.mesh
        first = mesh.stage_processors(device_index % mesh.num_stages)[0]
        return str(self.available_devices.reshape([-1])[first])


def mesh_cluster(mesh: Mesh, device_type: str = "CPU", do_eval: bool = False) -> Any:
    """The lingvo cluster of one process whose model split is the mesh.

    To be entered with `with`; `WorkerDeviceInModelSplit(i)` is then the first device of
    `mesh.stage_processors(i)`. The other devices of a stage idle, which is a warning: layers of
    lingvo are not split, so only the axis `layers` speeds them up.

    Args:
        mesh: the mesh; all its devices belong to this process.
        device_type: `CPU` or `GPU`.
        do_eval: whether layers run in evaluation mode.

    Raises:
        DeviceError: there are fewer logical devices than the mesh has.
        MeshError: the mesh has several devices and no axis `layers`.

    Example:
        >>> cluster = mesh_cluster(Mesh.from_text("layers:1"))
        >>> cluster.WorkerDeviceInModelSplit(0)
        '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh {mesh!r} is no Mesh; write Mesh.from_text('layers:2')")
    if mesh.num_devices > 1 and LAYERS_AXIS not in mesh.axis_names:
        raise MeshError(
            f"mesh '{mesh}' has no axis 'layers', so all layers would run on its first device and "
            f"{mesh.num_devices - 1} devices would idle; name an axis 'layers', for example "
            f"'layers:{mesh.num_devices}'"
        )
    found = len(tf.config.list_logical_devices(device_type))
    if found < mesh.num_devices:
        raise DeviceError(
            f"mesh {mesh} needs {mesh.num_devices} {device_type} devices, but {found} exist; use a "
            "smaller mesh or set up more logical devices before TensorFlow starts"
        )
    used = [mesh.stage_processors(stage)[0] for stage in range(mesh.num_stages)]
    idle = [f"{device_type}:{i}" for i in range(mesh.num_devices) if i not in used]
    if idle:
        warnings.warn(
            f"mesh '{mesh}' has {mesh.num_devices} devices, but a stage of lingvo layers runs on "
            f"one: {', '.join(idle)} will idle. Use the mesh 'layers:{mesh.num_stages}', or cut "
            f"the layers into {mesh.num_devices} stages on 'layers:{mesh.num_devices}'",
            stacklevel=2,
        )
    params = MeshCluster.Params()
    for name, value in cluster_factory.Current().params.Copy().IterParams():
        if name != "cls" and name in params:
            params.Set(**{name: value})
    params.mesh = mesh
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


def stage_devices(cluster: Any, homes: Sequence[int], name: str) -> list[str]:
    """The device of each stage of a stack.

    Args:
        cluster: the one that is entered, a mesh's or any of lingvo's.
        homes: for each stage the number of its place along the axis `layers`.
        name: of the stack.

    Raises:
        PipelineError: the places along the axis `layers` cannot have equally many of those in
            `homes`. (A multiple shares them, place by place; clusters that are no mesh start
            again with the first device in any case, as in lingvo.)
    """
    if isinstance(cluster, MeshCluster):
        needed, there = len(set(homes)), cluster.mesh.num_stages
        if needed > there and needed % there:
            raise PipelineError(
                f"{name}: {len(homes)} stages need {needed} places along the axis 'layers', but "
                f"mesh '{cluster.mesh}' has {there}, and {needed} is no multiple of it, so some "
                f"devices would do more than others; cut the layers into {there} stages or a "
                f"multiple, or use 'layers:{needed}'"
            )
        if there > needed:
            warnings.warn(
                f"{name}: mesh '{cluster.mesh}' has {there} places along the axis 'layers', but "
                f"its {len(homes)} stages lie on {needed}: the other devices idle; cut the layers "
                f"into {there} stages or use 'layers:{needed}'",
                stacklevel=3,
            )
    return [cluster.WorkerDeviceInModelSplit(home) for home in homes]
