"""A pipeline of stages that take and return tensors of the same shapes, as one loop over ticks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.recurrent.circular.tick_loop import Leaves, TickLoop
from pipemesh.recurrent.circular.traced_stages import TracedStages
from pipemesh.recurrent.executor import pipeline
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.remat import Mode, remat_of
from pipemesh.recurrent.stage import Grads, Stage, Tensors
from pipemesh.recurrent.table.machine import Machine, State
from pipemesh.recurrent.watch.finite_values import LOCATING
from pipemesh.schedule import Action, Schedule, looped_bfs


def alike_pipeline(
    stages: Sequence[Stage],
    inputs: Sequence[tf.Tensor],
    schedule: Schedule,
    *,
    step: tf.Tensor | None = None,
    options: Options | None = None,
) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
    """Runs a batch through stages with inputs and outputs of the same shapes, as one loop.

    It returns the same results as `pipeline`. The graph does not grow with the number of
    microbatches, and the forward pass keeps only the stages' inputs.

    Args:
        stages: the stages, first to last, each on one device and without a carry.
        inputs: tensors with static shapes; all are split along `options.batch_dim`. The outputs of
            a stage have the shapes and dtypes of its inputs.
        schedule: `looped_bfs`; with one stage per device it is `gpipe`.
        step: int64 scalar, the global step. It is part of the key of random numbers.
        options: settings of the run. Remat is `full`, and `loop` is always True. A clock and
            `check_numerics="all"` are not supported.

    Returns:
        The outputs of the last stage for the whole batch, and an empty carry for each stage.

    Raises:
        PipelineError: see `pipeline`; or the stages differ in their tensors, or an option is not
            supported.
        ScheduleError: the schedule is not `looped_bfs`.

    Example:
        >>> import tensorflow as tf
        >>> def double(theta, carry, inputs, microbatch, step):
        ...     return [inputs[0] * theta[0]], []
        >>> @tf.function
        ... def run(x):
        ...     two = [tf.constant(2.0)]
        ...     stages = [Stage(f"s{i}", double, two, [], "CPU:0") for i in range(4)]
        ...     return alike_pipeline(stages, [x], looped_bfs(2, 4, 2))[0][0]
        >>> [float(y) for y in run(tf.range(4.0))]
        [0.0, 16.0, 32.0, 48.0]
    """
    options = options or Options()
    check_options(options)
    check_schedule(schedule)
    for stage in stages:
        if stage.carry:
            raise PipelineError(
                f"stage {stage.name!r} hands something from microbatch to microbatch "
                "(accumulators, or averages of batch normalization), which a loop over ticks does "
                "not; use lowering='placement'"
            )
        if len(stage.devices) > 1:
            raise PipelineError(
                f"stage {stage.name!r} has {len(stage.devices)} devices ({stage.home}), of which a "
                "loop over ticks uses one; use lowering='placement' for replicas"
            )
    stages = [_checked(stage) for stage in stages]
    performer = functools.partial(Circular, schedule)
    return pipeline(stages, inputs, schedule, step=step, options=options, performer=performer)


def check_options(options: Options) -> None:
    """Raises a PipelineError with a remedy if a loop over ticks does not support the options."""
    locating = {policy for policies in LOCATING.values() for policy in policies}
    for name, wrong, allowed in (
        (
            "remat",
            not remat_of(options.remat).is_full,
            "the stage is always computed again ('full')",
        ),
        ("loop", options.loop is False, "it is always a loop (None or True)"),
        ("clock", options.clock is not None, "no action of its own can be noted (None)"),
        (
            "check_numerics",
            options.check_numerics in locating,
            "it does not look into stages ('results', 'loss' or 'off')",
        ),
    ):
        if wrong:
            raise PipelineError(
                f"{name} is {getattr(options, name)!r}, but in a loop over ticks {allowed}; leave "
                "it out, or use lowering='placement'"
            )


def check_schedule(schedule: Schedule) -> None:
    """Raises a ScheduleError if a loop over ticks cannot run the schedule."""
    devices, stages = schedule.num_devices, schedule.num_stages
    if stages % devices == 0:
        own = looped_bfs(devices, schedule.num_microbatches, stages // devices)
        if schedule in (own, own.only_forward()):
            return
    raise ScheduleError(
        "a loop over ticks runs all forward passes of a stage, then those of the device's next "
        "one, and backward the reverse; use schedule='gpipe' for one stage a device, "
        "'looped_bfs:V' for V of them, or lowering='placement'"
    )


class Circular:
    """A performer that runs a schedule as one loop forward and one backward.

    `modes` of remat are all `full`; the parameter makes it exchangeable with other performers.
    """

    def __init__(
        self,
        schedule: Schedule,
        machine: Machine,
        state: State,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
        modes: Mapping[tuple[int, int], Mode],
    ) -> None:
        del modes
        self.state = state
        self._machine = machine
        self._inputs = inputs
        self._cutting = cutting
        self._devices = [stages[core].device for core in range(schedule.num_devices)]
        for traced in machine.traced:
            _check_tells_nothing(traced)
        for number, stage in enumerate(stages):
            home = self._devices[schedule.stage_devices[number]]
            if stage.device != home:
                raise PipelineError(
                    f"stage {stage.name!r} is on {stage.device!r}, but the schedule puts it beside "
                    f"a stage on {home!r}; put both on one device"
                )
        self._ticking = TracedStages(machine, self._devices)
        mesh = Mesh(((LAYERS_AXIS, len(self._devices)),))
        lowering = PlacementLowering(mesh, LayoutRules(), self._devices)
        has_gradient = [i in self._ticking.floating for i in range(len(inputs))]
        self._loop = TickLoop(schedule, lowering, self._ticking, has_gradient)
        self._outputs: Leaves = ()
        self._saved: Leaves = ()
        self._seeds: Grads = []
        self._grads: Leaves = ()

    def perform(self, actions: Sequence[Action]) -> None:
        """Runs the loop for these actions, forward or backward."""
        if actions[0].kind == "F":
            stream = tuple(self._cut(tensor) for tensor in self._inputs)
            self._outputs, self._saved = self._loop.forward(stream, [])
            return
        seeds = []
        for i in self._ticking.floating:
            grad = self._seeds[i]
            if grad is None:
                with tf.device(self._devices[0]):
                    grad = tf.zeros(self._inputs[i].shape, self._inputs[i].dtype)
            seeds.append(self._cut(grad))
        saved = self._saved
        self._grads, sums = self._loop.backward(tuple(seeds), saved, [])
        self.state.accumulators = [list(of_stage) for of_stage in sums]

    def seed(self, output_grads: Grads) -> None:
        """Takes the gradients of the outputs of the whole batch."""
        self._seeds = list(output_grads)

    def outputs(self) -> Tensors:
        """Returns the last stage's outputs for the whole batch."""
        with tf.device(self._machine.stages[-1].device):
            return [self._join(leaf) for leaf in self._outputs]

    def input_grads(self) -> Grads:
        """Returns the gradients of the pipeline's inputs."""
        with tf.device(self._machine.stages[0].device):
            found = dict(zip(self._ticking.floating, self._grads, strict=True))
            names = self._machine.traced[0].gradients.of_inputs
            return [None if name is None else self._join(found[i]) for i, name in enumerate(names)]

    def _cut(self, tensor: tf.Tensor) -> Slices:
        """Returns the microbatches, stacked, for the first core, and zeros for the others."""
        dim, count = self._cutting.batch_dim, self._cutting.num_microbatches
        sizes = static_sizes(tensor)
        with tf.device(self._devices[0]):
            cut = tf.reshape(tensor, [*sizes[:dim], count, -1, *sizes[dim + 1 :]])
            rest = [d for d in range(len(sizes) + 1) if d != dim]
            slices = [tf.transpose(cut, [dim, *rest])]
        for device in self._devices[1:]:
            with tf.device(device):
                slices.append(tf.zeros(slices[0].shape, tensor.dtype))
        return tuple(slices)

    def _join(self, leaf: Slices) -> tf.Tensor:
        """Returns the first core's slice, as a tensor of the whole batch."""
        dim = self._cutting.batch_dim
        slots = leaf[0]
        sizes = static_sizes(slots)[1:]
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
        sizes[dim] *= self._cutting.num_microbatches
        return tf.reshape(tf.transpose(slots, order), sizes)


def _checked(stage: Stage) -> Stage:
    """Returns the stage with a check that its outputs match its inputs."""

    def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        outputs, carry = stage.forward(theta, carry, inputs, microbatch, step)
        _check_alike(stage.name, inputs, outputs)
        return outputs, carry

    return dataclasses.replace(stage, forward=forward)


def _check_alike(name: str, given: Sequence[tf.Tensor], found: Sequence[tf.Tensor]) -> None:
    if len(found) != len(given):
        raise PipelineError(
            f"stage {name!r} returns {len(found)} tensors and is given {len(given)}; in a loop "
            "over ticks they are alike: hand on what later stages need, or use "
            "lowering='placement'"
        )
    for number, (mine, theirs) in enumerate(zip(found, given, strict=True)):
        if not mine.shape.is_fully_defined():
            raise PipelineError(
                f"output {number} of stage {name!r} has shape {mine.shape}; a loop over ticks "
                f"needs static shapes: set it with tf.ensure_shape, to {theirs.shape}"
            )
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise PipelineError(
                f"output {number} of stage {name!r} is {mine.dtype.name} of shape {mine.shape}, "
                f"but it is given {theirs.dtype.name} of shape {theirs.shape}; in a loop over "
                "ticks they are alike: put layers that change them before or behind the stack, or "
                "use lowering='placement'"
            )


def _check_tells_nothing(traced: TracedStage) -> None:
    if traced.summaries is not None:
        raise PipelineError(
            f"stage {traced.stage.name!r} writes summaries, which a loop over ticks does not hand "
            "on; turn them off (the cluster's add_summary=False), or use lowering='placement'"
        )
