"""The plan of a stack, from the params that users of lingvo set."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError, PipemeshError, ScheduleError
from pipemesh.layers.check_params import (
    check_batch_dim,
    check_choice,
    check_flags,
    check_floating,
    check_whole,
)
from pipemesh.layers.feature_extraction import is_stage
from pipemesh.layers.mesh_cluster import mesh_of
from pipemesh.layers.pipeline.alike_stages import check_lowering
from pipemesh.layers.pipeline.losses import ACCUMULATIONS
from pipemesh.mesh import Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import Plan
from pipemesh.plan.homes import unused_axes
from pipemesh.plan.plan import value_text
from pipemesh.recurrent.remat import policy_of, remat_of
from pipemesh.recurrent.table.validation import check_phases
from pipemesh.schedule import Schedule, ScheduleSpec
from pipemesh.schedule.names import listing

# The param of a stack for each value of a plan.
PARAMS = {
    "schedule": "schedule",
    "num_microbatches": "num_micro_batches",
    "remat": "remat",
    "lowering": "lowering",
    "compute_dtype": "fprop_dtype",
}


def define_pipelining(p: Any) -> None:
    """Defines microbatches, the schedule, recomputation and checks."""
    p.Define("num_micro_batches", 1, "Number of microbatches; must divide the batch.")
    p.Define("micro_batch_size", None, "Size of a microbatch; given or derived.")
    p.Define("batch_dim", 0, "The batch dimension of all inputs and outputs.")
    p.Define("state_dtype", None, "If set, the dtype of floating tensors that stages return.")
    p.Define("nested_map_fprop", False, "Whether the stages take and return exactly one NestedMap.")
    p.Define(
        "schedule",
        "gpipe",
        f"The order of actions on each device, by name: {listing(for_layers=True)}; or a Schedule. "
        "All but gpipe and looped_bfs need the loss inside the pipeline (loss_inside).",
    )
    p.Define(
        "loss_inside",
        False,
        "Whether the last layer is a head, which returns a microbatch's summed loss, summed weight "
        "and metrics. FProp then returns these for the whole batch: metrics with a batch dim are "
        "joined, scalars have one element a microbatch and replica. Only the loss has a gradient.",
    )
    p.Define(
        "aux_loss_microbatch_accumulation",
        None,
        "How scalars that layers add to an AuxLossContext are joined over microbatches: 'mean' or "
        "'sum', as the layers join examples.",
    )
    p.Define(
        "remat",
        "full",
        "What is computed again in the backward pass, such as 'full', 'none', or 'full,none' for "
        "two stages; see pipemesh.recurrent.Options.",
    )
    p.Define("loop", None, "Whether the schedule is one loop of the graph; None: by size.")
    p.Define(
        "check_numerics",
        None,
        "What must be finite; see pipemesh.recurrent.Options. Where FProp is called eagerly, by "
        "default 'all' with lowering='placement', in float16 'forward'.",
    )
    p.Define(
        "lowering",
        "placement",
        "How the stages run: 'placement', each action on its device; or 'simd', one loop over "
        "ticks for stages that are alike but for their names.",
    )
    p.Define("pipelined", True, "False runs the whole batch as SeqLayer does, for comparison.")
    p.Define("strict_devices", False, "Whether an operation on another device is an error.")
    p.Define("compile", False, "Whether XLA compiles what each action computes.")


def set_plan(p: Any, plan: Plan, names: Collection[str] = PARAMS) -> None:
    """Sets the params of a stack to the values of a plan, of all names in `PARAMS` or of some."""
    dtype = plan.compute_dtype
    values = {name: getattr(plan, name) for name in PARAMS}
    values |= {"remat": str(plan.remat), "compute_dtype": dtype and tf.as_dtype(dtype)}
    p.Set(**{PARAMS[name]: value for name, value in values.items() if name in names})


def values_of(p: Any) -> dict[str, str]:
    """Returns the values of a plan that the params of a stack define, without the mesh."""
    dtype = p.fprop_dtype
    return {
        "schedule": value_text(p.schedule),
        "num_microbatches": str(p.num_micro_batches),
        "remat": str(remat_of(p.remat)),
        "lowering": p.lowering,
        "layout": str(p.layout or ""),
        "allow_idle": value_text(bool(p.allow_idle)),
        **({} if dtype is None else {"compute_dtype": tf.as_dtype(dtype).name}),
    }


def num_places(p: Any, schedule: str | Schedule) -> int:
    """Returns the number of positions along the axis `layers` that a schedule needs for a stack."""
    if isinstance(schedule, Schedule):
        return schedule.num_devices
    number, stages_a_device = len(p.cell_tpl), ScheduleSpec.from_text(schedule).stages_a_device
    if not number:
        raise PipelineError("cell_tpl is empty; a pipeline needs at least one stage")
    places, rest = divmod(number, stages_a_device)
    if rest:
        raise PipelineError(
            f"schedule {schedule!r} has {stages_a_device} stages a device, but cell_tpl has "
            f"{number} stages, which is no multiple; cut the layers into "
            f"{number - rest or stages_a_device} stages"
        )
    return places


def plan_of(p: Any, cluster: Any) -> Plan:
    """Returns the plan of a stack's params on a cluster.

    The plan's axis `layers` has one position for each device of the schedule. It may be longer than
    the cluster's axis: then several share a position.
    """
    mesh, layout = mesh_of(cluster, p)
    sizes = [len(cell.sub) if is_stage(cell) else 1 for cell in p.cell_tpl]
    try:
        _check_counts(p)
        mesh = _with_places(mesh, num_places(p, p.schedule))
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


def checked_plan(p: Any, cluster: Any) -> Plan:
    """Returns the plan of a stack's params, after all checks of the params and the stages."""
    _check_params(p)
    plan = plan_of(p, cluster)
    check_lowering(p, plan.table)
    if not p.loss_inside:
        _check_loss_outside(p, plan.table)
    return plan


def _check_params(p: Any) -> None:
    """Checks the params of a stack that no plan has."""
    if not p.cell_tpl:
        raise PipelineError(f"{p.name}: cell_tpl is empty; a pipeline needs at least one stage")
    check_whole(p.name, "num_micro_batches", p.num_micro_batches, 1)
    if p.micro_batch_size is not None:
        check_whole(p.name, "micro_batch_size", p.micro_batch_size, 1)
    check_batch_dim(p)
    check_flags(
        p,
        ("loss_inside", "nested_map_fprop", "pipelined", "strict_devices", "compile"),
        or_none=("loop",),
    )
    check_floating(p.name, "state_dtype", p.state_dtype)
    if p.aux_loss_microbatch_accumulation is not None:
        what = "aux_loss_microbatch_accumulation"
        check_choice(p.name, what, p.aux_loss_microbatch_accumulation, ACCUMULATIONS)
    try:
        policy_of(p.remat)
    except PipelineError as error:
        raise PipelineError(f"{p.name}: {error}") from error
    if p.loss_inside and p.nested_map_fprop:
        raise PipelineError(
            f"{p.name}: with loss_inside the last layer returns scalars and tensors, not one "
            "NestedMap; leave nested_map_fprop unset"
        )
    if p.compile and not p.pipelined:
        raise PipelineError(
            f"{p.name}: without a pipeline no stage is compiled; set pipelined=True, or leave "
            "compile unset"
        )
    if not p.pipelined and p.fprop_dtype == tf.float16:
        raise PipelineError(
            f"{p.name}: without a pipeline the loss is not scaled, which float16 needs; set "
            "pipelined=True or another fprop_dtype"
        )


def _check_counts(p: Any) -> None:
    """Checks that a table in the params has their numbers of stages and microbatches."""
    table = p.schedule
    if not isinstance(table, Schedule):
        table = ScheduleSpec.from_text(table).table
    if table is None:
        # One that is built has the stack's.
        return
    num_stages, number = table.num_stages, table.num_microbatches
    if (num_stages, number) != (len(p.cell_tpl), p.num_micro_batches):
        raise PipelineError(
            f"the schedule has {num_stages} stages and {number} microbatches, but there are "
            f"{len(p.cell_tpl)} in cell_tpl and num_micro_batches is {p.num_micro_batches}; make "
            "them equal"
        )


def _check_loss_outside(p: Any, schedule: Schedule) -> None:
    """Checks that backward passes start after all forward passes, if the loss is outside."""
    try:
        check_phases(schedule)
    except ScheduleError as error:
        name = "its schedule" if isinstance(p.schedule, Schedule) else f"schedule {p.schedule!r}"
        raise ScheduleError(
            f"{p.name}: {name} starts backward passes before all forward ones are done, which "
            "needs the loss inside the pipeline; set loss_inside=True and let the last layer "
            "return the summed loss and the summed weight, or, with the loss outside, use "
            "schedule='gpipe' or 'looped_bfs'"
        ) from error


def _with_places(mesh: Mesh | None, number: int) -> Mesh:
    """Returns the mesh with `number` positions along the axis `layers`, which is first if new."""
    if mesh is None:
        return Mesh(((LAYERS_AXIS, number),))
    if LAYERS_AXIS not in mesh.axis_names and number > 1:
        return Mesh(((LAYERS_AXIS, number), *mesh.axes))

    def at_places(name: str, size: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if name == LAYERS_AXIS:
            return number
        # Sizes at positions start again after the last.
        return size if isinstance(size, int) else tuple(size[i % len(size)] for i in range(number))

    return Mesh(tuple((name, at_places(name, size)) for name, size in mesh.axes))
