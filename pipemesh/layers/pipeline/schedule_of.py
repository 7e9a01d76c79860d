"""The schedule of a pipeline's params."""

from __future__ import annotations

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
from pipemesh.layers.pipeline.alike_stages import check_lowering, check_simd
from pipemesh.layers.pipeline.aux_losses import ACCUMULATIONS
from pipemesh.recurrent.remat import policy_of
from pipemesh.recurrent.table.validation import check_phases
from pipemesh.schedule import Schedule, ScheduleSpec


def schedule_of(p: Any) -> Schedule:
    """Returns the training schedule, checked against the stages.

    Raises:
        PipelineError: the params contradict each other or the schedule.
        ScheduleError: the schedule is unknown or malformed.
    """
    if not p.cell_tpl:
        raise PipelineError(f"{p.name}: cell_tpl is empty; a pipeline needs at least one stage")
    check_whole(p.name, "num_micro_batches", p.num_micro_batches, 1)
    if p.micro_batch_size is not None:
        check_whole(p.name, "micro_batch_size", p.micro_batch_size, 1)
    check_batch_dim(p)
    check_flags(
        p,
        ("loss_inside", "nested_map_fprop", "pipelined", "strict_devices"),
        or_none=("loop", "rolled"),
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
    if not p.pipelined and p.fprop_dtype == tf.float16:
        raise PipelineError(
            f"{p.name}: without a pipeline the loss is not scaled, which float16 needs; set "
            "pipelined=True or another fprop_dtype"
        )
    schedule = p.schedule if isinstance(p.schedule, Schedule) else _named(p)
    num_stages = len(p.cell_tpl)
    found = (schedule.num_stages, schedule.num_microbatches)
    if found != (num_stages, p.num_micro_batches):
        raise PipelineError(
            f"{p.name}: the schedule has {found[0]} stages and {found[1]} microbatches, but "
            f"there are {num_stages} in cell_tpl and num_micro_batches is "
            f"{p.num_micro_batches}; make them equal"
        )
    if schedule.num_slices > 1:
        raise PipelineError(
            f"{p.name}: the schedule cuts sequences into {schedule.num_slices} slices, but layers "
            "take whole sequences: attention would see the positions of a slice alone. Give a "
            "schedule without slices, such as schedule='1f1b'; stages of your own functions can "
            "have them (pipemesh.recurrent.Stage, takes_slices)"
        )
    check_lowering(p, schedule)
    if p.lowering == "simd" and p.loss_inside:
        check_simd(p)
    if not p.loss_inside:
        _check_loss_outside(p, schedule)
    return schedule


def _named(p: Any) -> Schedule:
    try:
        spec = ScheduleSpec.from_text(p.schedule)
        num_stages = len(p.cell_tpl)
        num_devices, rest = divmod(num_stages, spec.stages_a_device)
        if rest:
            raise PipelineError(
                f"schedule {p.schedule!r} has {spec.stages_a_device} stages a device, but "
                f"cell_tpl has {num_stages} stages, which is no multiple; cut the layers into "
                f"{num_stages - rest or spec.stages_a_device} stages"
            )
        return spec.build(num_devices, p.num_micro_batches)
    except PipemeshError as error:
        raise type(error)(f"{p.name}: {error}") from error


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
