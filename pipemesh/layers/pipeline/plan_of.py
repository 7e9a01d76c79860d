"""The plan of a pipeline's params."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipemeshError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.pipeline.homes import mesh_of
from pipemesh.mesh import Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import Plan
from pipemesh.plan.homes import unused_axes
from pipemesh.recurrent.remat import remat_of
from pipemesh.schedule import Schedule


def plan_of(p: Any, schedule: Schedule, cluster: Any) -> Plan:
    """Returns the plan of a pipeline on a cluster.

    The plan's axis `layers` has one position for each device of the schedule. It may be longer than
    the cluster's axis: then several share a position.

    Raises:
        PipemeshError: the mesh or the layout is not supported, or devices would idle.
    """
    mesh, layout = mesh_of(cluster, p)
    mesh = _with_places(mesh, schedule.num_devices)
    sizes = [
        len(cell.sub) if issubclass(cell.cls, FeatureExtractionLayer) else 1 for cell in p.cell_tpl
    ]
    try:
        return Plan(
            mesh,
            layout,
            p.schedule,
            p.num_micro_batches,
            # A stage without layers only passes on its inputs.
            boundaries=tuple(itertools.accumulate(sizes, initial=0)) if all(sizes) else None,
            remat=remat_of(p.remat),
            lowering=p.lowering,
            compute_dtype=None if p.fprop_dtype is None else tf.as_dtype(p.fprop_dtype).name,
            # An earlier check has warned of idle axes.
            allow_idle=bool(unused_axes(mesh, layout)),
        )
    except PipemeshError as error:
        raise type(error)(f"{p.name}: {error}") from error


def _with_places(mesh: Mesh | None, number: int) -> Mesh:
    """Returns the mesh with `number` positions along the axis `layers`, which is first if new."""
    if mesh is None:
        return Mesh(((LAYERS_AXIS, number),))
    if LAYERS_AXIS not in mesh.axis_names and number > 1:
        return Mesh(((LAYERS_AXIS, number), *mesh.axes))
    return Mesh(
        tuple(
            (name, number if name == LAYERS_AXIS else _of_places(size, number))
            for name, size in mesh.axes
        )
    )


def _of_places(size: int | tuple[int, ...], number: int) -> int | tuple[int, ...]:
    """Returns the size of an axis at each position, which wraps around after the last."""
    return size if isinstance(size, int) else tuple(size[i % len(size)] for i in range(number))
