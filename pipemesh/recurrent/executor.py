"""Runs a schedule as one graph: explicit devices, order held by control dependencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipemesh.backend.gradients import with_gradient
from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.passes.places import detached
from pipemesh.recurrent.stage import Stage
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
    """Runs a batch through stages, microbatch by microbatch, as a schedule says.

    To be called while a graph is built: inside a `tf.function` or under a TF1 graph. Gradients
    of the outputs, by `tf.GradientTape` or `tf.gradients`, run the schedule's backward actions on
    the devices of their stages.

    Args:
        stages: the stages, first to last; each takes the outputs of the one before.
        inputs: tensors with static shapes; all are cut along `options.batch_dim`.
        schedule: on each device all forwards come before all backwards, because the gradient of
            the outputs is known only after all of them; see `pipeline_loss` for other schedules.
        step: int64 scalar, the global step, that random numbers are keyed by.
        options: how it runs.
        performer: makes another object that performs the actions; see `circular`.

    Returns:
        The outputs of the last stage for the whole batch, and each stage's carry after the last
        microbatch, through which gradients flow if the stage is recurrent.

    Raises:
        PipelineError: the batch does not divide, shapes are not static, an output is not cut along
            the batch, or there is no graph.
        ScheduleError: the schedule does not fit the stages or cannot be run with the loss outside
            of the pipeline.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.schedule import gpipe
        >>> def double(theta, carry, inputs, microbatch, step):
        ...     return [inputs[0] * theta[0]], []
        >>> @tf.function
        ... def run(x):
        ...     two = [tf.constant(2.0)]
        ...     stages = [Stage(f"s{i}", double, two, [], "CPU:0") for i in range(2)]
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
    run.checks.forward(outputs, "an output", run.state.notes["forward"])
    outputs = run.checks.after_forward(outputs, stages[-1].device)
    run.finish_carries(run.checks.after_forward)
    # The states of recurrent stages are results as well.
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
    """Runs a batch through stages whose last one ends in a loss, forward and backward.

    With the loss inside, the backward pass of a microbatch can start before the others have gone
    forward, so every schedule can be run. To be called while a graph is built; the gradient of
    the loss, by `tf.GradientTape` or `tf.gradients`, costs no more than a product with the
    gradient that arrives.

    Args:
        stages: the stages, first to last. The last one's first output is a floating scalar: the
            loss of the microbatch, or of a replica's part of it, *summed* over its examples. Its
            other outputs are for looking at and have no gradient.
        inputs: tensors with static shapes; all are cut along `options.batch_dim`.
        schedule: any valid schedule; one without backward actions gives a loss without gradient.
        step: int64 scalar, the global step, that random numbers are keyed by.
        options: how it runs.

    Returns:
        The loss summed over the batch, a scalar of at least 32 bits; the other outputs of the last
        stage for the whole batch, where scalars become a vector with one element a microbatch
        (with replicas, one for each replica's part of it); and each stage's carry after the last
        microbatch.

    Raises:
        PipelineError: the batch does not divide, shapes are not static, the first output of the
            last stage is no floating scalar, another is neither a scalar nor cut along the batch,
            or there is no graph.
        ScheduleError: the schedule does not fit the stages.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.schedule import one_f_one_b
        >>> def scale(theta, carry, inputs, microbatch, step):
        ...     return [inputs[0] * theta[0]], []
        >>> def square(theta, carry, inputs, microbatch, step):
        ...     return [tf.reduce_sum(inputs[0] ** 2)], []
        >>> weight = tf.Variable(3.0)
        >>> @tf.function
        ... def run(x):
        ...     with tf.GradientTape() as tape:
        ...         theta = [tf.convert_to_tensor(weight)]
        ...         stages = [Stage("a", scale, theta, [], "CPU:0"),
        ...                   Stage("loss", square, [], [], "CPU:0")]
        ...         loss, _, _ = pipeline_loss(stages, [x], one_f_one_b(2, 4))
        ...     return loss, tape.gradient(loss, weight)
        >>> [float(y) for y in run(tf.range(4.0))]
        [126.0, 84.0]
    """
    stages = [*stages[:-1], with_loss(stages[-1])] if stages else stages
    run = Run(stages, inputs, schedule, step, options := options or Options())
    spec = run.last_specs[0] if run.last_specs else None
    if spec is None or spec.shape.rank != 0 or not spec.dtype.is_floating:
        given = "nothing" if spec is None else f"{spec.dtype.name} of shape {spec.shape}"
        raise PipelineError(
            f"the first output of the last stage is {given}; with the loss inside the pipeline it "
            "is the microbatch's loss, a floating scalar"
        )
    if options.noted_run is not None:
        options.noted_run(run)
    run.seed_loss()
    run.perform(run.order)
    losses, *others = run.outputs()
    with tf.device(stages[-1].device):
        # Of few bits, a sum over microbatches would lose some.
        loss = tf.reduce_sum(tf.cast(losses, tf.float32) if losses.dtype.size < 4 else losses)
    run.checks.forward([loss], "the loss", run.state.notes["forward"])
    loss, *others = run.checks.after_forward([loss, *others], stages[-1].device)
    run.finish_carries(run.checks.after_both)

    def backward(output_grads: Grads) -> list[Grads]:
        if schedule.is_forward_only:
            raise ScheduleError(
                "a gradient is asked for, but the schedule has no backward actions; use one_f_one_b"
            )
        return run.gradients(factor=output_grads[0])

    (loss,) = with_gradient(detached([loss]), stages[-1].device, run.sources, backward)
    return loss, detached(others), [*map(detached, run.state.carries)]
