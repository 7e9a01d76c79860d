"""Predicts the memory that a run needs on each device, before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.run import Run
from pipemesh.recurrent.table.values import KEPT, PENDING, REMADE, given, taken
from pipemesh.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """The memory that a device of a home keeps of the first microbatch for its backward pass.

    Attributes:
        kept: bytes in total.
        kept_inputs: for each input its bytes if it is kept, else 0.
        kept_outputs: for each output True if it is kept.
        outputs: shapes and dtypes of the outputs.
        pending: bytes that are kept between an `I` and its `W`; 0 if the schedule has none.
    """

    kept: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[bool, ...]
    outputs: tuple[tf.TensorSpec, ...]
    pending: int = 0


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    Attributes:
        weights: the weights of its stages, once each, in the dtype of computation.
        gradients: the sums of their gradients.
        kept: the peak of the tensors kept for backward passes: results of forward passes or of an
            `R`, and tensors that an `I` leaves for its `W`. A tensor that two actions need counts
            twice, such as an output that is the input of another stage on the same device.
        stages: the memory that each of its stages keeps of one microbatch. Ignored in comparisons.
        device: its name. Ignored in comparisons.
    """

    weights: int
    gradients: int
    kept: int
    stages: tuple[StageMemory, ...] = dataclasses.field(default=(), compare=False, repr=False)
    device: str = dataclasses.field(default="", compare=False, repr=False)

    @property
    def total(self) -> int:
        """The sum of weights, gradients and kept tensors, without temporary tensors of actions."""
        return self.weights + self.gradients + self.kept


def predict_memory(
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    *,
    step: tf.Tensor | None = None,
    options: Options | None = None,
) -> list[DeviceMemory]:
    """Predicts the memory that `pipeline` or `pipeline_loss` would need with these arguments.

    It traces the stages and runs nothing. Call it inside a `tf.function` or a TF1 graph.

    Args:
        stages: as for `pipeline`.
        inputs: as for `pipeline`.
        schedule: as for `pipeline`.
        step: as for `pipeline`.
        options: as for `pipeline`; remat and compute dtype change the result.

    Returns:
        The memory of each device, ordered by the rows of the schedule. For a device that a home
        names several times it includes all of its replicas, but the weights once.

    Raises:
        PipelineError: see `pipeline`.
        ScheduleError: see `pipeline`.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.schedule import gpipe, one_f_one_b
        >>> def scale(theta, carry, inputs, microbatch, step):
        ...     return [tf.nn.tanh(inputs[0] * theta[0])], []
        >>> with tf.Graph().as_default():
        ...     stages = [Stage(f"s{i}", scale, [tf.ones([10])], [], "CPU:0") for i in range(2)]
        ...     for builder in (gpipe, one_f_one_b):
        ...         memory = predict_memory(stages, [tf.ones([8, 10])], builder(2, 8))
        ...         print([device.kept for device in memory])
        [320, 320]
        [80, 40]
    """
    return memory_of(Run(stages, inputs, schedule, step, options or Options()))


def memory_of(run: Run) -> list[DeviceMemory]:
    """Returns the memory that a run needs; see `predict_memory`.

    Args:
        run: the argument of `Options.noted_run`.
    """
    stages, schedule = run.stages, run.schedule
    recomputed = schedule.recomputed()
    found = []
    for home, row in enumerate(schedule.rows):
        own = [s for s, owner in enumerate(schedule.stage_devices) if owner == home]
        devices = stages[own[0]].devices
        for device in dict.fromkeys(devices):
            places = [number for number, name in enumerate(devices) if name == device]
            held = peak = 0
            for action in row:
                stage, m = action.stage, action.microbatch
                is_recomputed = (stage, m) in recomputed
                changes = [(1, channel) for channel in given(action.kind, stage)]
                changes += [(-1, channel) for channel in taken(action.kind, stage, is_recomputed)]
                held += sum(
                    sign * run.sizes.values(channel.kind, stage, place, m)
                    for sign, channel in changes
                    if channel.kind in (KEPT, REMADE, PENDING) and not schedule.is_forward_only
                    for place in places
                )
                peak = max(peak, held)
            weights = sum(run.sizes.weights(s, places) for s in own)
            gradients = 0
            if not schedule.is_forward_only:
                gradients = sum(run.sizes.sums(s, p) for s in own for p in places)
            each = tuple(_of_stage(run, s, places[0]) for s in own)
            found.append(DeviceMemory(weights, gradients, peak, each, device))
    return found


def _of_stage(run: Run, stage: int, place: int) -> StageMemory:
    traced, kept = run.sizes.kept_names(stage)
    # A kept input may have the name of an identity of it.
    names = {same for name in kept for same in traced.cut.same_value(name)}
    inputs, outputs = (
        [name for name in every if traced.place(name) == place]
        for every in (traced.inputs, traced.outputs)
    )
    halves = any(action.kind == "I" for row in run.schedule.rows for action in row)
    return StageMemory(
        kept=run.sizes.values(KEPT, stage, place),
        kept_inputs=tuple(num_bytes([traced.spec(n)]) if n in names else 0 for n in inputs),
        kept_outputs=tuple(not names.isdisjoint(traced.cut.same_value(name)) for name in outputs),
        outputs=tuple(map(traced.spec, outputs)),
        pending=run.sizes.values(PENDING, stage, place) if halves else 0,
    )
