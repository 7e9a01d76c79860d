"""A pipeline of stages that take and return tensors of the same shapes, as one loop over ticks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import on_each
from pipemesh.backend.static_shape import join_from_front, split_to_front
from pipemesh.backend.structure import is_differentiable
from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.recurrent.circular.tick_loop import Leaves, RingTicks, Sums, Tick, TickLoop
from pipemesh.recurrent.executor import pipeline
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.passes.passes import by_name
from pipemesh.recurrent.remat import FULL, Mode, remat_of
from pipemesh.recurrent.stage import Grads, Stage, Tensors
from pipemesh.recurrent.table.machine import Machine, State
from pipemesh.recurrent.watch.finite_values import LOCATING, empty_note
from pipemesh.schedule import Action, Schedule
from pipemesh.schedule.builders import is_looped


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
        >>> from pipemesh.schedule import looped_bfs
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
        ("compile", options.compile, "the stage is no function that XLA could compile (False)"),
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
    if is_looped(schedule):
        return
    raise ScheduleError(
        "a loop over ticks runs all forward passes of a stage, then those of the device's next "
        "one, and backward the reverse; use schedule='gpipe' for one stage a device, "
        "'looped_bfs:V' for V of them, or lowering='placement'"
    )


class Circular:
    """A performer that runs a schedule as one loop forward and one backward."""

    def __init__(
        self,
        schedule: Schedule,
        machine: Machine,
        state: State,
        modes: Mapping[tuple[int, int], Mode],
    ) -> None:
        # All are `full`; the parameter makes performers exchangeable.
        del modes
        self.state = state
        self._machine = machine
        self._inputs, self._cutting, stages = machine.inputs, machine.cutting, machine.stages
        self._devices = [stages[core].device for core in range(schedule.num_devices)]
        for traced in machine.traced:
            if traced.summaries is not None:
                raise PipelineError(
                    f"stage {traced.stage.name!r} writes summaries, which a loop over ticks does "
                    "not hand on; turn them off (the cluster's add_summary=False), or use "
                    "lowering='placement'"
                )
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
        rounds = schedule.num_stages // schedule.num_devices
        ticks = RingTicks(schedule.num_devices, schedule.num_microbatches, rounds)
        self._loop = TickLoop(lowering, ticks)
        self._outputs: Leaves = ()
        self._saved: Leaves = ()
        self._seeds: Grads = []
        self._grads: Leaves = ()

    def perform(self, actions: Sequence[Action]) -> None:
        """Runs the loop for these actions, forward or backward."""
        if actions[0].kind == "F":
            stream = tuple(self._cut(tensor) for tensor in self._inputs)
            self._outputs, self._saved = self._loop.forward(self._ticking, stream)
            return
        seeds = []
        for i in self._ticking.floating:
            grad = self._seeds[i]
            if grad is None:
                with tf.device(self._devices[0]):
                    grad = tf.zeros(self._inputs[i].shape, self._inputs[i].dtype)
            seeds.append(self._cut(grad))
        self._grads, sums = self._loop.backward(self._ticking, tuple(seeds), self._saved)
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
            grads = dict(zip(self._ticking.floating, self._grads, strict=True))
            names = self._machine.traced[0].gradients.of_inputs
            return [None if name is None else self._join(grads[i]) for i, name in enumerate(names)]

    def _cut(self, tensor: tf.Tensor) -> Slices:
        """Returns the microbatches, stacked, for the first core, and zeros for the others."""
        with tf.device(self._devices[0]):
            cut = split_to_front(tensor, self._cutting.batch_dim, self._cutting.num_microbatches)
        return cut, *on_each(self._devices[1:], lambda: tf.zeros(cut.shape, tensor.dtype))

    def _join(self, leaf: Slices) -> tf.Tensor:
        """Returns the first core's slice, as a tensor of the whole batch."""
        return join_from_front(leaf[0], self._cutting.batch_dim)


def _checked(stage: Stage) -> Stage:
    """Returns the stage with a check that its outputs match its inputs."""

    def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        outputs, carry = stage.forward(theta, carry, inputs, microbatch, step)
        _check_alike(stage.name, inputs, outputs)
        return outputs, carry

    return dataclasses.replace(stage, forward=forward)


def _check_alike(name: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> None:
    if len(outputs) != len(inputs):
        raise PipelineError(
            f"stage {name!r} returns {len(outputs)} tensors and is given {len(inputs)}; in a loop "
            "over ticks they are alike: hand on what later stages need, or use "
            "lowering='placement'"
        )
    for number, (output, input_) in enumerate(zip(outputs, inputs, strict=True)):
        if not output.shape.is_fully_defined():
            raise PipelineError(
                f"output {number} of stage {name!r} has shape {output.shape}; a loop over ticks "
                f"needs static shapes: set it with tf.ensure_shape, to {input_.shape}"
            )
        if output.shape != input_.shape or output.dtype != input_.dtype:
            raise PipelineError(
                f"output {number} of stage {name!r} is {output.dtype.name} of shape "
                f"{output.shape}, but it is given {input_.dtype.name} of shape {input_.shape}; in "
                "a loop over ticks they are alike: put layers that change them before or behind "
                "the stack, or use lowering='placement'"
            )


class TracedStages:
    """The computation of one tick of `alike_pipeline`: on each core, the stage that is due.

    A core chooses among the functions of its stages, so each stage keeps its own weights and random
    numbers. At ticks without work it passes its input on: it computes nothing, and no check fails.
    """

    def __init__(self, machine: Machine, devices: Sequence[str]) -> None:
        self._machine = machine
        self._devices = devices
        self._stages = machine.stages
        self._traced = machine.traced
        self._passes = [machine.passes(number, FULL) for number in range(len(machine.stages))]
        for passes in self._passes:
            passes.make()
        # Tensors that a loop uses are moved to its device before.
        self._steps = on_each(devices, lambda: tf.identity(machine.step))
        specs = self._traced[0].output_specs
        # Indices of the tensors between stages that may have a gradient.
        self.floating = [i for i, spec in enumerate(specs) if is_differentiable(spec)]

    def forward(self, now: Tick, x: Leaves) -> Leaves:
        """Returns the outputs of the stages."""

        def on_core(core: int, scalars: Tensors) -> Tensors:
            inputs = [leaf[core] for leaf in x]

            def stage(number: int) -> Tensors:
                theta = list(self._stages[number].theta)
                values = self._passes[number].run("F", theta, inputs, scalars, [empty_note()])
                return by_name(values, self._traced[number].outputs)

            return self._choose(core, now, stage, inputs)

        return tuple(zip(*self._each_core(now, on_core), strict=True))

    def zero_sums(self) -> Sums:
        """Returns for each stage zero sums of the gradients of its weights."""
        numbers = range(len(self._stages))
        return tuple(tuple(self._machine.zero_gradients(number)) for number in numbers)

    def backward(self, now: Tick, x: Leaves, grad_y: Leaves, sums: Sums) -> tuple[Leaves, Sums]:
        """Recomputes the stages; returns gradients of their inputs, and the sums."""
        new = [list(of_stage) for of_stage in sums]

        def on_core(core: int, scalars: Tensors) -> Tensors:
            inputs, grads = [leaf[core] for leaf in x], [leaf[core] for leaf in grad_y]
            numbers = range(core, len(self._stages), len(self._devices))

            def stage(number: int) -> Tensors:
                grad_x, added = self._backward_of(number, inputs, grads, scalars, sums[number])
                return [
                    *grad_x,
                    *(t for other in numbers for t in (added if other == number else sums[other])),
                ]

            idle = [*map(tf.zeros_like, grads), *(t for number in numbers for t in sums[number])]
            results = iter(self._choose(core, now, stage, idle))
            grad_x = [next(results) for _ in grads]
            for number in numbers:
                new[number] = [next(results) for _ in sums[number]]
            return grad_x

        return tuple(zip(*self._each_core(now, on_core), strict=True)), tuple(map(tuple, new))

    def _backward_of(
        self,
        number: int,
        inputs: Tensors,
        grads: Tensors,
        scalars: Tensors,
        sums: Sequence[tf.Tensor],
    ) -> tuple[Tensors, Tensors]:
        traced, passes = self._traced[number], self._passes[number]
        by_place = dict(zip(self.floating, grads, strict=True))
        kept = by_name(dict(zip(traced.inputs, inputs, strict=True)), passes.cuts.kept)
        incoming = [by_place[i] for i in traced.gradients.of_outputs]
        theta = list(self._stages[number].theta)
        values = passes.run("B", theta, [*kept, *incoming], scalars, [empty_note()], list(sums))
        input_grads = by_name(values, traced.gradients.of_inputs)
        grad_x = [
            tf.zeros_like(inputs[i]) if input_grads[i] is None else input_grads[i]
            for i in self.floating
        ]
        return grad_x, by_name(values, passes.sum_names)

    def _each_core(self, now: Tick, on_core: Callable[[int, Tensors], Tensors]) -> list[Tensors]:
        results: list[Tensors] = []
        for core, device in enumerate(self._devices):
            with tf.device(device):
                microbatch = tf.cast(now.microbatch[core], tf.int64)
                results.append(on_core(core, [microbatch, self._steps[core]]))
        return results

    def _choose(
        self, core: int, now: Tick, stage: Callable[[int], Tensors], idle: Tensors
    ) -> Tensors:
        """Returns the result of the stage that is due, or of `idle` at a tick without work."""
        numbers = range(core, len(self._stages), len(self._devices))
        results = [lambda: [tf.identity(t) for t in idle]]
        results += [functools.partial(stage, number) for number in numbers]

        def on_device(result: Callable[[], Tensors]) -> Tensors:
            with tf.device(self._devices[core]):
                return list(result())

        which = tf.where(now.busy[core], now.round[core] + 1, 0)
        branches = [functools.partial(on_device, result) for result in results]
        return list(tf.switch_case(which, branches))
