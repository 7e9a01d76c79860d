"""Whether a batch and a schedule fit the pipeline that is to run them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.traced_stage import Cutting, TracedStage
from pipemesh.recurrent.passes.tracing import Specs, output_specs
from pipemesh.recurrent.stage import Stage
from pipemesh.schedule import Schedule


def microbatch_size(
    inputs: Sequence[tf.Tensor],
    num_microbatches: int,
    batch_dim: int,
    names: Sequence[str] | None = None,
    replicas: int = 1,
) -> int:
    """The number of examples in a microbatch.

    Args:
        inputs: of the pipeline, for the whole batch.
        num_microbatches: how many microbatches it is cut into.
        batch_dim: the dim along which it is cut.
        names: of the inputs, for errors.
        replicas: into how many parts each microbatch is cut.

    Raises:
        PipelineError: there is no input, a shape is not static, batch sizes differ, or the batch
            does not divide.
    """
    names = names or [f"input {number}" for number in range(len(inputs))]
    if not inputs:
        raise PipelineError(
            "a pipeline was given no tensor; it needs at least one, to be cut into microbatches"
        )
    sizes: dict[int, str] = {}
    for name, tensor in zip(names, inputs, strict=True):
        if not tensor.shape.is_fully_defined():
            raise PipelineError(
                f"{name} has shape {tensor.shape}; a pipeline needs static shapes: set the "
                "batch size (drop_remainder=True) and pad sequences to a fixed length"
            )
        if tensor.shape.rank <= batch_dim:
            raise PipelineError(
                f"{name} has shape {tensor.shape} and no dim {batch_dim} (batch_dim), along which "
                "it is to be cut; give what is the same for all examples once for each, or as a "
                "weight or a param of a layer"
            )
        sizes.setdefault(static_sizes(tensor)[batch_dim], name)
    if len(sizes) != 1:
        found = ", ".join(f"{size} ({name})" for size, name in sorted(sizes.items()))
        raise PipelineError(
            f"the inputs have batch sizes {found} in dim {batch_dim} (batch_dim); they must be one"
        )
    (batch,) = sizes
    if batch % num_microbatches:
        divisors = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        raise PipelineError(
            f"a batch of {batch} does not divide into {num_microbatches} microbatches; "
            f"num_micro_batches may be {', '.join(divisors)}"
        )
    size = batch // num_microbatches
    if size % replicas:
        raise PipelineError(
            f"a microbatch of {size} examples does not divide among the {replicas} replicas of a "
            f"stage; the batch, {batch}, must be a multiple of {num_microbatches * replicas} (the "
            "microbatches times the replicas)"
        )
    return size


def num_replicas(stages: Sequence[Stage], stage_devices: Sequence[int]) -> int:
    """How many replicas each stage has.

    Args:
        stages: the stages.
        stage_devices: for each stage the row of the schedule that runs it.

    Raises:
        PipelineError: not all have as many, or replicas of as many devices as the others of their
            row; or a recurrent stage has several.
    """
    if not stages:
        return 1
    first = stages[0]
    wanted = first.of_home.num_replicas
    of_row: dict[int, Stage] = {}
    for stage, row in zip(stages, stage_devices, strict=True):
        if stage.of_home.num_replicas != wanted:
            raise PipelineError(
                f"stage {first.name!r} has {wanted} replicas ({first.of_home}), but stage "
                f"{stage.name!r} has {stage.of_home.num_replicas} ({stage.of_home}); give all "
                "stages of a pipeline as many replicas, of as many devices each as they need"
            )
        other = of_row.setdefault(row, stage)
        if len(stage.of_home) != len(other.of_home):
            raise PipelineError(
                f"stage {other.name!r} has {len(other.of_home)} devices ({other.of_home}), but "
                f"stage {stage.name!r} has {len(stage.of_home)} ({stage.of_home}), and one row of "
                "the schedule runs both; give stages of a row one home"
            )
        if stage.recurrent and wanted > 1:
            raise PipelineError(
                f"stage {stage.name!r} is recurrent and has {wanted} replicas ({stage.of_home}); "
                "its state goes from microbatch to microbatch, so that replicas would wait for "
                "each other: give it one"
            )
    return wanted


def check_joined(traced: TracedStage, cutting: Cutting, has_step: bool) -> None:
    """Checks that the last stage's outputs for parts of the batch make up those of the whole.

    That is so if each is cut along the batch dim, or a scalar, of which there is one a part.
    Where the size of a part alone does not tell whether a dim is the batch, because another dim
    is as large, or the output is the same for any input, the stage is traced for the whole batch
    as well.

    Raises:
        PipelineError: an output is not cut along the batch.
    """
    if cutting.num_parts == 1 or traced.stage.recurrent:
        return
    size, dim = cutting.part_size, cutting.batch_dim
    specs = traced.output_specs
    for number, spec in enumerate(specs):
        if spec.shape.rank is None or (spec.shape.rank > dim and spec.shape[dim] is None):
            raise PipelineError(
                f"output {number} of the last stage ({traced.stage.name!r}) has shape "
                f"{spec.shape}; its size in dim {dim} (batch_dim) must be known before it runs: if "
                f"there is one for each of the {size} examples of {cutting.part}, set its shape "
                "with tf.ensure_shape, or else pad it"
            )
        if spec.shape.rank > dim and spec.shape[dim] != size:
            raise PipelineError(_not_cut(traced, cutting, number, f"has shape {spec.shape}"))
        if 0 < spec.shape.rank <= dim:
            raise PipelineError(
                f"output {number} of the last stage ({traced.stage.name!r}) has shape "
                f"{spec.shape} and no dim {dim} (batch_dim) along which {cutting.parts} can be "
                "joined; add the dim, or return a scalar with the loss inside the pipeline"
            )
    doubtful = [
        n for n, spec in enumerate(specs) if spec.shape.rank and _doubtful(traced, n, cutting)
    ]
    whole = _whole_outputs(traced, cutting, has_step) if doubtful else None
    if whole is None:
        return
    for number in doubtful:
        shape = whole[number].shape
        if shape.rank is not None and shape[dim] not in (None, size * cutting.num_parts):
            found = f"has shape {specs[number].shape} and for the whole batch {shape}"
            raise PipelineError(_not_cut(traced, cutting, number, found))


def _doubtful(traced: TracedStage, number: int, cutting: Cutting) -> bool:
    """Whether an output may have the size of a part by chance."""
    size, dim = cutting.part_size, cutting.batch_dim
    computed = traced.cut.ancestors([traced.outputs[number]])
    if not any(node_of(name) in computed for name in traced.inputs):
        return True
    others = [traced.spec(name).shape.as_list() for name in traced.inputs]
    dims = {d for shape in others for d in [*shape[:dim], *shape[dim + 1 :]]}
    return size == 1 or size in dims


def _whole_outputs(traced: TracedStage, cutting: Cutting, has_step: bool) -> Specs | None:
    """What the last stage returns for the whole batch; None if that cannot be told."""
    size, dim = cutting.part_size, cutting.batch_dim
    specs = []
    for name in traced.inputs[: len(traced.replicas[0].inputs)]:
        spec = traced.spec(name)
        shape = spec.shape.as_list()
        if len(shape) > dim and shape[dim] == size:
            shape[dim] = size * cutting.num_parts
        specs.append(tf.TensorSpec(shape, spec.dtype))
    try:
        return output_specs(traced.given, specs, has_step)
    except (ValueError, TypeError, tf.errors.OpError):
        # What goes between stages need not be cut along the batch, and then this guess is wrong.
        return None


def _not_cut(traced: TracedStage, cutting: Cutting, number: int, found: str) -> str:
    return (
        f"output {number} of the last stage ({traced.stage.name!r}) {found}; {cutting.parts} have "
        f"{cutting.part_size} examples in dim {cutting.batch_dim} (batch_dim), so it is not "
        "cut along the batch, and joined it would not be what the whole batch gives; return it "
        "once for each example, or compute it after the pipeline, or return scalars with the loss "
        f"inside the pipeline, which come back as one for {cutting.part}"
    )


def check_actions(schedule: Schedule) -> None:
    """Refuses actions that no pipeline runs yet, before any of the stages is traced.

    Raises:
        ScheduleError: the schedule has slices; says what does the same.
    """
    if schedule.num_slices > 1:
        raise ScheduleError(
            f"the schedule cuts sequences into {schedule.num_slices} slices, which can be "
            "simulated, but not run: attention within a pipeline takes whole sequences; give a "
            "schedule without slices, such as one_f_one_b"
        )


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
            if action.kind in "RW":
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
