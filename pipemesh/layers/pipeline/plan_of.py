"""The plan that a pipeline's params ask for."""

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
    """How a pipeline is run on a cluster, as a value.

    Args:
        p: params of a `PipeliningLayer`, checked.
        schedule: the table that they ask for.
        cluster: the one that is entered.

    Returns:
        The plan. Its axis `layers` is as long as the schedule has devices, which may be longer than
        that of the cluster: then several share a place.

    Raises:
        PipemeshError: the mesh or the layout cannot be had, or devices would idle.
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
            # A stage may have no layer of its own, only hand on what it is given.
            boundaries=tuple(itertools.accumulate(sizes, initial=0)) if all(sizes) else None,
            remat=remat_of(p.remat),
            lowering=p.lowering,
            compute_dtype=None if p.fprop_dtype is None else tf.as_dtype(p.fprop_dtype).name,
            # Whoever asked for them was told.
            allow_idle=bool(unused_axes(mesh, layout)),
        )
    except PipemeshError as error:
        raise type(error)(f"{p.name}: {error}") from error


def _with_places(mesh: Mesh | None, number: int) -> Mesh:
    """The mesh with so many places along the axis `layers`, which comes first if it is new."""
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
    """Of an axis the size at so many places, which start again after the last."""
    return size if isinstance(size, int) else tuple(size[i % len(size)] for i in range(number))
