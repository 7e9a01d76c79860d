"""Whether a batch and a schedule fit the pipeline that is to run them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.schedule import Schedule


def microbatch_size(inputs: Sequence[tf.Tensor], num_microbatches: int, batch_dim: int) -> int:
    """The number of examples in a microbatch.

    Raises:
        PipelineError: a shape is not static, batch sizes differ, or the batch does not divide.
    """
    sizes = set()
    for number, tensor in enumerate(inputs):
        if not tensor.shape.is_fully_defined():
            raise PipelineError(
                f"input {number} has shape {tensor.shape}; a pipeline needs static shapes: set the "
                "batch size (drop_remainder=True) and pad sequences to a fixed length"
            )
        if tensor.shape.rank <= batch_dim:
            raise PipelineError(
                f"input {number} has shape {tensor.shape} and no dim {batch_dim} (batch_dim)"
            )
        sizes.add(int(tensor.shape[batch_dim]))
    if len(sizes) != 1:
        raise PipelineError(
            f"the inputs have batch sizes {sorted(sizes)} in dim {batch_dim}; they must be one"
        )
    (batch,) = sizes
    if batch % num_microbatches:
        divisors = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        raise PipelineError(
            f"a batch of {batch} does not divide into {num_microbatches} microbatches; "
            f"num_micro_batches may be {', '.join(divisors)}"
        )
    return batch // num_microbatches


def check_phases(schedule: Schedule) -> None:
    """With the loss outside, on each device all forwards come before all backwards.

    Raises:
        ScheduleError: a forward action follows a backward one on its device.
    """
    for device, row in enumerate(schedule.rows):
        seen_backward = False
        for tick, action in enumerate(row):
            if action.kind == "F" and seen_backward:
                raise ScheduleError(
                    f"device {device}, tick {tick}: {action} follows a backward action, which "
                    "needs the loss inside the pipeline (pipeline_loss); use gpipe while the loss "
                    "is outside"
                )
            seen_backward |= action.kind != "F"


def check_descending(schedule: Schedule) -> None:
    """Recurrent stages go forward through the microbatches and backward from the last.

    Raises:
        ScheduleError: the schedule has another order.
    """
    latest: dict[tuple[int, str], int] = {}
    for device, row in enumerate(schedule.rows):
        for tick, action in enumerate(row):
            direction = "F" if action.kind == "F" else "BI"
            if action.kind == "W":
                continue
            before = latest.get((action.stage, direction))
            latest[action.stage, direction] = action.microbatch
            step = 1 if action.kind == "F" else -1
            if before is not None and action.microbatch != before + step:
                raise ScheduleError(
                    f"device {device}, tick {tick}: {action} follows microbatch {before}; the "
                    "state of a recurrent stage goes from each microbatch to the next, so "
                    "forwards must ascend and backwards descend by one, as in gpipe"
                )
