"""Runs a schedule as one graph, with explicit devices and an order held by control dependencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend.gradients import with_gradient
from pipemesh.backend.operations import pin_behind
from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.tracing import detached
from pipemesh.recurrent.stage import Grads, Stage
from pipemesh.recurrent.table.run import Performer, Run, with_loss
from pipemesh.schedule import Schedule


@tf.autograph.experimental.do_not_convert
def pipeline(
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    *,
    step: tf.Tensor | None = None,
    options: Options | None = None,
    performer: Callable[..., Performer] | None = None,
) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
    """Runs a batch through stages, microbatch by microbatch, in the order of a schedule.

    Call it inside a `tf.function` or a TF1 graph. Gradients of the outputs (`tf.GradientTape`,
    `tf.gradients`) run the backward actions on the devices of their stages.

    Args:
        stages: the stages, first to last. Each takes the outputs of the previous one.
        inputs: tensors with static shapes; all are split along `options.batch_dim`.
        schedule: on each device all forward actions come before all backward actions, because the
            gradient of the outputs depends on all of them. For other schedules see `pipeline_loss`.
        step: int64 scalar, the global step. It is part of the key of random numbers.
        options: settings of the run.
        performer: creates a different object to perform the actions; see `circular`.

    Returns:
        The outputs of the last stage for the whole batch, and each stage's carry after the last
        microbatch. Gradients flow through the carry of a recurrent stage.

    Raises:
        PipelineError: the batch does not divide, a shape is not static, an output is not split
            along the batch, or no graph is being built.
        ScheduleError: the schedule does not fit the stages, or needs the loss inside the pipeline.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.schedule import gpipe
        >>> def double(theta, carry, inputs, microbatch, step):
        ...     return [inputs[0] * 2.0], []
        >>> @tf.function
        ... def run(x):
        ...     stages = [Stage(f"s{i}", double, [], [], "CPU:0") for i in range(2)]
        ...     return pipeline(stages, [x], gpipe(2, 4))[0][0]
        >>> [float(y) for y in run(tf.range(4.0))]
        [0.0, 4.0, 8.0, 12.0]
    """
    run = Run(stages, inputs, schedule, step, options := options or Options(), performer)
    if options.noted_run is not None:
        options.noted_run(run)
    forwards, backwards = run.phases()
    if any(spec.shape.rank == 0 for spec in run.last_specs):
        raise PipelineError(
            "the last stage returns a scalar, which cannot be joined over microbatches; return it "
            "for each example, or, if it is the loss, use pipeline_loss"
        )
    run.perform(forwards)
    outputs = run.outputs()
    run.checks.forward(outputs, "an output", run.state.forward_notes)
    outputs = pin_behind(run.checks.passed_forward, outputs, stages[-1].device)
    run.finish_carries(run.checks.passed_forward)
    # The states of recurrent stages are results, too.
    states = [t for carry in run.recurrent(run.state.carries) for t in carry]

    def backward(grads: Grads) -> list[Grads]:
        if not backwards:
            raise ScheduleError(
                "a gradient is asked for, but the schedule has no backward actions; use gpipe"
            )
        run.seed(grads[: len(outputs)], grads[len(outputs) :])
        run.perform(backwards)
        return run.gradients()

    results = with_gradient(
        detached([*outputs, *states]),
        stages[-1].device,
        run.sources,
        backward,
    )
    attached = iter(results[len(outputs) :])
    carries = [
        [next(attached) for _ in carry] if stage.recurrent else detached(carry)
        for stage, carry in zip(stages, run.state.carries, strict=True)
    ]
    return results[: len(outputs)], carries


@tf.autograph.experimental.do_not_convert
def pipeline_loss(
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    *,
    step: tf.Tensor | None = None,
    options: Options | None = None,
) -> tuple[tf.Tensor, list[tf.Tensor], list[list[tf.Tensor]]]:
    """Runs a batch forward and backward through stages that end in a loss.

    With the loss inside, a microbatch can start its backward pass before the others finish their
    forward passes. So every schedule is supported. Call it inside a `tf.function` or a TF1 graph.
    The backward actions run at once: a later `tf.GradientTape.gradient` or `tf.gradients` only
    multiplies their results by the incoming gradient.

    Args:
        stages: the stages, first to last. The first output of the last stage is a floating scalar:
            the loss of the microbatch (or of a replica's part of it), *summed* over its examples.
            Its other outputs are for monitoring and have no gradient.
        schedule: any valid schedule. Without backward actions the loss has no gradient.
        inputs, step, options: as for `pipeline`.

    Returns:
        The loss, the other outputs, and the carries of `pipeline`. The loss is summed over the
        batch, a scalar of at least 32 bits. The other outputs of the last stage are for the whole
        batch; a scalar becomes a vector with one element per microbatch and replica.

    Raises:
        PipelineError: as for `pipeline`; or the first output of the last stage is not a floating
            scalar, or another output is neither a scalar nor split along the batch.
        ScheduleError: the schedule does not fit the stages.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.schedule import one_f_one_b
        >>> def squares(theta, carry, inputs, microbatch, step):
        ...     return [tf.reduce_sum((inputs[0] * theta[0]) ** 2)], []
        >>> weight = tf.Variable(3.0)
        >>> @tf.function
        ... def run(x):
        ...     with tf.GradientTape() as tape:
        ...         stage = Stage("loss", squares, [tf.convert_to_tensor(weight)], [], "CPU:0")
        ...         loss, _, _ = pipeline_loss([stage], [x], one_f_one_b(1, 4))
        ...     return loss, tape.gradient(loss, weight)
        >>> [float(y) for y in run(tf.range(4.0))]
        [126.0, 84.0]
    """
    stages = [*stages[:-1], with_loss(stages[-1])] if stages else stages
    run = Run(stages, inputs, schedule, step, options := options or Options())
    spec = run.last_specs[0] if run.last_specs else None
    if spec is None or spec.shape.rank != 0 or not spec.dtype.is_floating:
        output = "nothing" if spec is None else f"{spec.dtype.name} of shape {spec.shape}"
        raise PipelineError(
            f"the first output of the last stage is {output}; with the loss inside the pipeline it "
            "is the microbatch's loss, a floating scalar"
        )
    if options.noted_run is not None:
        options.noted_run(run)
    run.seed_loss()
    run.perform(run.order)
    losses, *others = run.outputs()
    with tf.device(stages[-1].device):
        # In 16 bits, a sum over microbatches would lose precision.
        loss = tf.reduce_sum(tf.cast(losses, tf.float32) if losses.dtype.size < 4 else losses)
    run.checks.forward([loss], "the loss", run.state.forward_notes)
    loss, *others = pin_behind(run.checks.passed_forward, [loss, *others], stages[-1].device)
    run.finish_carries(run.checks.passed_both())

    def backward(output_grads: Grads) -> list[Grads]:
        if schedule.is_forward_only:
            raise ScheduleError(
                "a gradient is asked for, but the schedule has no backward actions; use one_f_one_b"
            )
        return run.gradients(factor=output_grads[0])

    (loss,) = with_gradient(detached([loss]), stages[-1].device, run.sources, backward)
    return loss, detached(others), [*map(detached, run.state.carries)]
