"""Checks that a batch and a schedule fit the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError, PlanError, ScheduleError
from pipemesh.plan.plan import check_batch
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import Specs, specs_of, trace
from pipemesh.recurrent.stage import Stage
from pipemesh.schedule import Schedule


def microbatch_size(
    inputs: Sequence[tf.Tensor],
    num_microbatches: int,
    batch_dim: int,
    names: Sequence[str] | None = None,
    replicas: int = 1,
) -> int:
    """Returns the number of examples in a microbatch, and checks that the batch divides."""
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
        text = ", ".join(f"{size} ({name})" for size, name in sorted(sizes.items()))
        raise PipelineError(
            f"the inputs have batch sizes {text} in dim {batch_dim} (batch_dim); they must be one"
        )
    (batch,) = sizes
    try:
        check_batch(batch, num_microbatches, replicas, name="num_micro_batches")
    except PlanError as error:
        raise PipelineError(str(error)) from error
    return batch // num_microbatches


def num_replicas(stages: Sequence[Stage], stage_devices: Sequence[int], num_slices: int = 1) -> int:
    """Returns the number of replicas of the stages, after a check that it is equal for all."""
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
        if stage.recurrent and wanted > 1 and num_slices == 1:
            raise PipelineError(
                f"stage {stage.name!r} is recurrent and has {wanted} replicas ({stage.of_home}); "
                "its state goes from microbatch to microbatch, so that replicas would wait for "
                "each other: give it one, or a schedule with slices, from which each replica has "
                "its own state"
            )
    return wanted


def check_sliced(stages: Sequence[Stage], schedule: Schedule) -> None:
    """Checks that all stages take slices of sequences, if the schedule has some."""
    for stage in stages if schedule.num_slices > 1 else ():
        if not stage.takes_slices:
            raise PipelineError(
                f"the schedule cuts sequences into {schedule.num_slices} slices, and stage "
                f"{stage.name!r} does not say that it can be given one: what looks at other "
                "positions would see those of the slice alone. Give a schedule without slices, "
                "such as one_f_one_b, or, if the function works position by position or hands on "
                "what later positions need in the carry of a recurrent stage, "
                "Stage(takes_slices=True)"
            )


def check_joined(traced: TracedStage, cutting: Cutting, has_step: bool) -> None:
    """Checks that the last stage's outputs for parts of the batch can be joined.

    Each must be split along the batch dim, and along the sequence dim if there are slices, or be a
    scalar. The size alone may not identify that dim: another dim may have it, or the output may not
    depend on the input. Then the stage is traced for the whole batch, too.
    """
    if traced.stage.recurrent and cutting.num_slices == 1:
        return
    batch = cutting.part_size * cutting.num_parts
    of_batch = cutting.batch_dim, cutting.part_size, batch
    of_sequences = cutting.sequence_dim, cutting.slice_size, cutting.length
    for along in (
        _Along("batch", "example", cutting.part, cutting.parts, *of_batch),
        _Along("sequence", "position", "a slice", "slices", *of_sequences),
    ):
        if along.total > along.size:
            _check_along(traced, along, cutting, has_step)


class _Along(NamedTuple):
    """A dim that outputs are split along, with the words for errors."""

    whole: str
    element: str
    part: str
    parts: str
    dim: int
    size: int  # of a part
    total: int  # of all parts


def _check_along(traced: TracedStage, along: _Along, cutting: Cutting, has_step: bool) -> None:
    size, dim, element = along.size, along.dim, along.element
    at = f"dim {dim} ({along.whole}_dim)"
    not_cut = (
        f"; {along.parts} have {size} {element}s in {at}, so it is not cut along the "
        f"{along.whole}, and joined it would not be what the whole {along.whole} gives; return it "
        f"once for each {element}, or compute it after the pipeline, or return scalars with the "
        f"loss inside the pipeline, which come back as one for {along.part}"
    )
    doubtful: dict[int, str] = {}
    for number, shape in enumerate(spec.shape for spec in traced.output_specs):
        text = f"output {number} of the last stage ({traced.stage.name!r}) has shape {shape}"
        if shape.rank is None or (shape.rank > dim and shape[dim] is None):
            raise PipelineError(
                f"{text}; its size in {at} must be known before it runs: if there is one for each "
                f"of the {size} {element}s of {along.part}, set its shape with tf.ensure_shape, or "
                "else pad it"
            )
        if shape.rank > dim and shape[dim] != size:
            raise PipelineError(text + not_cut)
        if 0 < shape.rank <= dim:
            raise PipelineError(
                f"{text} and no {at} along which {along.parts} can be joined; add the dim, or "
                "return a scalar with the loss inside the pipeline"
            )
        if shape.rank and _doubtful(traced, number, along):
            doubtful[number] = text
    whole = _whole_outputs(traced, along, cutting, has_step) if doubtful else None
    if whole is None:
        return
    for number, text in doubtful.items():
        shape = whole[number].shape
        if shape.rank is not None and shape[dim] not in (None, along.total):
            raise PipelineError(f"{text} and for the whole {along.whole} {shape}{not_cut}")


def _doubtful(traced: TracedStage, number: int, along: _Along) -> bool:
    """Returns True if an output may have the size of a part by chance."""
    size, dim = along.size, along.dim
    computed = traced.cut.ancestors([traced.outputs[number]])
    if not any(node_of(name) in computed for name in traced.inputs):
        return True
    others = [traced.spec(name).shape.as_list() for name in traced.inputs]
    dims = {d for shape in others for d in [*shape[:dim], *shape[dim + 1 :]]}
    return size == 1 or size in dims


def _whole_outputs(
    traced: TracedStage, along: _Along, cutting: Cutting, has_step: bool
) -> Specs | None:
    """Returns the last stage's outputs for joined parts, or None if the trace fails."""
    size, dim = along.size, along.dim
    specs = []
    for name in traced.inputs[: len(traced.replicas[0].inputs)]:
        spec = traced.spec(name)
        shape = spec.shape.as_list()
        if len(shape) > dim and shape[dim] == size:
            shape[dim] = along.total
        specs.append(tf.TensorSpec(shape, spec.dtype))
    stage = traced.given
    if along.whole == "batch":
        stage = cutting.for_whole_batch(stage)[0]
    try:
        return specs_of(trace(stage, specs, has_step).replicas[0].outputs)
    except (ValueError, TypeError, tf.errors.OpError):
        # Tensors between stages need not be split along the batch; then this guess is wrong.
        return None


def cutting_of(
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    batch_dim: int,
    sequence_dim: int,
    replicas: int,
    slice_lengths: Sequence[int] = (),
) -> Cutting:
    """Returns the split of the batch for a schedule, after a check that it divides."""
    count, slices = schedule.num_microbatches, schedule.num_slices
    size = microbatch_size(inputs, count, batch_dim, replicas=replicas)
    if slices == 1:
        return Cutting(count, size, batch_dim, replicas)
    length = sequence_length(inputs, slices, batch_dim, sequence_dim)
    if not slice_lengths and length % slices:
        divisors = ", ".join(str(n) for n in range(1, length + 1) if length % n == 0)
        raise PipelineError(
            f"the schedule cuts sequences into {slices} slices, and sequences of {length} "
            f"positions do not divide into them; use {divisors} slices, or pad the sequences"
        )
    if slice_lengths and not (
        len(slice_lengths) == slices and sum(slice_lengths) == length and min(slice_lengths) > 0
    ):
        raise PipelineError(
            f"slice_lengths={tuple(slice_lengths)} is invalid. Give {slices} lengths above 0, one "
            f"for each slice of the schedule, with the sum {length}, the length of the sequences"
        )
    # Equal lengths need one trace of each stage, not one for each slice.
    lengths = tuple(slice_lengths) if len({*slice_lengths}) > 1 else ()
    return Cutting(
        count, size, batch_dim, replicas, slices, length // slices, sequence_dim, lengths
    )


def sequence_length(
    inputs: Sequence[tf.Tensor | tf.TensorSpec], num_slices: int, batch_dim: int, sequence_dim: int
) -> int:
    """Returns the positions of the sequences that a schedule cuts, the same for all inputs."""
    what = f"the schedule cuts sequences into {num_slices} slices"
    if sequence_dim == batch_dim or sequence_dim < 0:
        raise PipelineError(
            f"{what}, and sequence_dim is {sequence_dim}; give a dim of the inputs, from 0, that "
            f"is not the batch's, which is {batch_dim} (batch_dim)"
        )
    lengths: dict[int, int] = {}
    for number, tensor in enumerate(inputs):
        if tensor.shape.rank > sequence_dim:
            lengths.setdefault(static_sizes(tensor)[sequence_dim], number)
    if len(lengths) != 1:
        text = ", ".join(f"{n} (input {number})" for n, number in sorted(lengths.items()))
        raise PipelineError(
            f"{what}, but the inputs have {f'lengths {text}' if text else 'no'} "
            f"{'in ' if text else ''}dim {sequence_dim} (sequence_dim); all that have this dim "
            "must be as long, and one has to have it. Give what is no sequence fewer dims, or the "
            "dim of the sequences as sequence_dim"
        )
    (length,) = lengths
    return length


def check_phases(schedule: Schedule) -> None:
    """Checks that on each device all forward actions come first, because the loss is outside."""
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
    """Checks that the state of recurrent stages goes in order, and its gradient back.

    With whole sequences a stage goes forward through the microbatches and backward from the last
    one. With slices it does so within each microbatch, which begins with a new state. Then
    microbatches may come in any order, but all slices of one before those of another.
    """
    latest: dict[tuple[int, str], int] = {}
    count, slices = schedule.num_pieces, schedule.num_slices
    for device, row in enumerate(schedule.rows):
        for tick, action in enumerate(row):
            if action.kind in "RW":
                continue
            step = 1 if action.kind == "F" else -1
            key = action.stage, "F" if step == 1 else "BI"
            before, now = latest.get(key), schedule.piece(action)
            latest[key] = now
            if before is None or now == before + step:
                continue
            if slices == 1:
                raise ScheduleError(
                    f"device {device}, tick {tick}: {action} follows microbatch {before}; the "
                    "state of a recurrent stage goes from each microbatch to the next, so "
                    "forwards must ascend and backwards descend by one, as in gpipe"
                )
            # The first slice in its direction: the previous one was the last of another microbatch.
            begins = (now if step == 1 else count - 1 - now) % slices == 0
            ended = (before + 1 if step == 1 else count - before) % slices == 0
            if not (begins and ended):
                raise ScheduleError(
                    f"device {device}, tick {tick}: {action} follows slice "
                    f"{before // slices}.{before % slices} of the same stage; a recurrent stage "
                    "hands its state from slice to slice, so all slices of a microbatch come "
                    "before those of another, forward from the first and backward from the last, "
                    "as in seq_one_f_one_b"
                )
