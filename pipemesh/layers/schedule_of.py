"""The schedule that a pipeline's params ask for."""

from __future__ import annotations

from typing import Any

from pipemesh.errors import PipelineError
from pipemesh.schedule import Schedule, ScheduleSpec


def schedule_of(p: Any) -> Schedule:
    """The table that training runs, checked against the stages.

    Args:
        p: params of a `PipeliningLayer`.

    Raises:
        PipelineError: the params contradict each other or the schedule.
        ScheduleError: the schedule is unknown or malformed.
    """
    if not p.cell_tpl:
        raise PipelineError(f"{p.name}: cell_tpl is empty; a pipeline needs at least one stage")
    for name, value in (
        ("num_micro_batches", p.num_micro_batches),
        ("micro_batch_size", p.micro_batch_size),
    ):
        if value is not None and value < 1:
            raise PipelineError(f"{p.name}: {name} is {value}; it must be at least 1")
    schedule = p.schedule
    num_stages = len(p.cell_tpl)
    if not isinstance(schedule, Schedule):
        spec = ScheduleSpec.from_text(schedule)
        num_devices, rest = divmod(num_stages, spec.stages_a_device)
        if rest:
            raise PipelineError(
                f"{p.name}: schedule {schedule!r} has {spec.stages_a_device} stages a device, "
                f"but cell_tpl has {num_stages} stages, which is no multiple; cut the layers "
                f"into {num_stages - rest or spec.stages_a_device} stages"
            )
        schedule = spec.build(num_devices, p.num_micro_batches)
    found = (schedule.num_stages, schedule.num_microbatches)
    if found != (num_stages, p.num_micro_batches):
        raise PipelineError(
            f"{p.name}: the schedule has {found[0]} stages and {found[1]} microbatches, but "
            f"there are {num_stages} in cell_tpl and num_micro_batches is "
            f"{p.num_micro_batches}; make them equal"
        )
    if p.loss_inside and p.nested_map_fprop:
        raise PipelineError(
            f"{p.name}: with loss_inside the last layer returns scalars and tensors, not one "
            "NestedMap; leave nested_map_fprop unset"
        )
    return schedule
