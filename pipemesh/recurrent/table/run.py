"""One run of a schedule: prepares stages, performs actions and collects gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from pipemesh.backend.devices import check_threads
from pipemesh.backend.gradients import Sources, unchecked_gradients
from pipemesh.backend.operations import MaybeTensor, pin_behind, wait_for
from pipemesh.backend.structure import is_differentiable
from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent.options import Options, cast_floating, sum_dtype
from pipemesh.recurrent.passes.captures import is_constant, is_stopped
from pipemesh.recurrent.passes.pieces import join, split
from pipemesh.recurrent.remat import Mode, modes_of
from pipemesh.recurrent.stage import Grads, Stage, Tensors, starting_anew
from pipemesh.recurrent.table.loop import Loop
from pipemesh.recurrent.table.machine import Machine, State, empty_notes
from pipemesh.recurrent.table.validation import (
    check_descending,
    check_joined,
    check_phases,
    check_sliced,
    cutting_of,
    num_replicas,
)
from pipemesh.recurrent.watch.finite_values import (
    MICROBATCH,
    OF_GRADIENTS,
    Direction,
    Finding,
    all_finite,
    empty_note,
    first_not_finite,
    raise_unless,
)
from pipemesh.recurrent.watch.placement import check_devices, check_kernels
from pipemesh.schedule import Action, Schedule, execution_order
from pipemesh.schedule.action import GRADS, OUTPUTS


class ActionByAction:
    """A performer that stores each value under the number of its microbatch, or piece."""

    def __init__(
        self,
        machine: Machine,
        state: State,
        modes: Mapping[tuple[int, int], Mode],
        machines: Sequence[Machine] = (),  # for each slice its own, if slices differ in length
    ) -> None:
        self.state = state
        self._machine = machine
        self._machines = machines or [machine]
        self._microbatch = 0
        self._modes = modes
        self._stages = machine.stages
        self._cutting = machine.cutting
        self._values: dict[tuple[str, int, int], list[Any]] = {}
        self._put(OUTPUTS, -1, machine.inputs, self._stages[0].device)

    def perform(self, actions: Sequence[Action]) -> None:
        """Performs actions in order."""
        self.state.forget_tokens_of_other_graphs()
        # Those of all slices have the same weights.
        self._machine.fetch()
        numbers: dict[tuple[int, str], tf.Tensor] = {}
        for action in actions:
            self._microbatch = action.microbatch
            mode = self._modes[action.stage, action.microbatch]
            machine = self._machines[action.microbatch % len(self._machines)]
            with machine.acting(f"action_{self._cutting.text(action)}", action.stage):
                key = action.microbatch, self._stages[action.stage].device
                if key not in numbers:
                    numbers[key] = tf.constant(action.microbatch, tf.int64)
                machine.act(action.kind, action.stage, mode, numbers[key], self)

    def read(self, kind: str, stage: int) -> list[Any]:
        """Returns a value of the current microbatch."""
        return self._values[kind, stage, self._microbatch]

    def write(self, kind: str, stage: int, value: Sequence[tf.Tensor | None]) -> None:
        """Stores a value for the current microbatch."""
        self._values[kind, stage, self._microbatch] = [*value]

    def seed(self, output_grads: Grads) -> None:
        """Splits the gradients of the outputs of the whole batch."""
        self._put(GRADS, len(self._stages), output_grads, self._stages[-1].device)

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        for m in range(self._cutting.num_pieces):
            self._values[GRADS, len(self._stages), m] = grads * self._cutting.replicas

    def outputs(self) -> Tensors:
        """Returns the last stage's outputs for the whole batch."""
        return self._joined(OUTPUTS, len(self._stages) - 1)

    def input_grads(self) -> Grads:
        """Returns the gradients of the pipeline's inputs."""
        return self._joined(GRADS, 0)

    def _joined(self, kind: str, stage: int) -> list[Any]:
        replicas = self._cutting.replicas
        by_part = []
        for m in range(self._cutting.num_pieces):
            values = self._values[kind, stage, m]
            count = len(values) // replicas
            by_part += [values[replica * count :][:count] for replica in range(replicas)]
        devices, places = self._stages[stage].devices, self._machine.places(kind, stage)
        joined: list[Any] = []
        for *parts, place in zip(*by_part, places[: len(by_part[0])], strict=True):
            with tf.device(devices[place]):
                joined.append(None if parts[0] is None else join(parts, self._cutting))
        return joined

    def _put(self, kind: str, stage: int, tensors: Sequence[tf.Tensor | None], device: str) -> None:
        """Gives each piece its parts of tensors, replica by replica."""
        none = [[None] * self._cutting.replicas] * self._cutting.num_pieces
        with tf.device(device):
            pieces = [none if t is None else split(t, self._cutting) for t in tensors]
        for m in range(self._cutting.num_pieces):
            self._values[kind, stage, m] = [
                piece[m][replica] for replica in range(self._cutting.replicas) for piece in pieces
            ]


# Before the first step, TensorFlow needs 0.2 to 0.3 ms of CPU time for each node of the graph. A
# loop's body has each kind of action once, plus some hundred nodes. But it costs each step 0.03 to
# 0.6 ms of CPU time per action. Compared with large actions that is little.
LOOP_ABOVE = 30_000
LOOP_LARGE_ACTIONS_ABOVE = 10_000
_LARGE_ACTION = 100
_OWN_NODES = 10
_OWN_NODES_IN_LOOP = 100


class Performer(Protocol):
    """A performer of actions, with the values that they pass to each other."""

    state: State

    def perform(self, actions: Sequence[Action]) -> None:
        """Performs actions in order."""

    def seed(self, output_grads: Grads) -> None:
        """Takes the gradients of the outputs of the whole batch."""

    def outputs(self) -> Tensors:
        """Returns the last stage's outputs for the whole batch."""
        ...

    def input_grads(self) -> Grads:
        """Returns the gradients of the pipeline's inputs."""
        ...


# For each stage the notes of its replicas.
Notes = Sequence[Sequence[tf.Tensor]]


class Checks:
    """The checks of one run for finite values."""

    def __init__(self, policy: str, machine: Machine) -> None:
        # One of `finite_values.CHECKS`.
        self._policy = policy
        self._traced, self._probes = machine.traced, machine.probes
        self._cutting = machine.cutting
        # Operations that end after the checks so far.
        self.passed_forward: list[tf.Operation] = []
        self.passed_backward: list[tf.Operation] = []
        self._both: list[tf.Operation] = []

    def forward(self, results: Sequence[tf.Tensor], what: str, notes: Notes) -> None:
        """Makes `passed_forward` wait for a check of the results."""
        if self._policy == "off":
            return
        last = self._traced[-1].stage
        with tf.device(last.device):
            is_finite = all_finite([t for t in results if t.dtype.is_floating])
        findings = [
            f for s in range(len(self._traced)) for f in self._findings("forward", s, notes)
        ]
        otherwise = place(last, (), f"forward: {what}")
        slices = self._cutting.num_slices
        self.passed_forward = [raise_unless(is_finite, findings, otherwise, last.device, slices)]

    def passed_both(self) -> list[tf.Operation]:
        """Returns operations that end after all checks; no gradient may depend on them."""
        if self.passed_forward and not self._both:
            with tf.control_dependencies(self.passed_forward):
                self._both = [tf.no_op()]
        return self._both

    def backward(self, grads: Sequence[Grads], notes: Notes) -> None:
        """Makes `passed_backward` wait for a check of the gradients."""
        # The gradient of an eager function has another graph, which runs after this one.
        graph = tf.compat.v1.get_default_graph()
        before = [op for op in self.passed_forward if op.graph is graph]
        if self._policy in OF_GRADIENTS:
            order = range(len(self._traced) - 1, -1, -1)
            totals = [self._total_finding(s, grads[s]) for s in order]
            findings = [f for s in order for f in self._findings("backward", s, notes)] + totals
            device = self._traced[0].stage.device
            is_finite = tf.reduce_all(tf.stack([total.note for total in totals]) < 0)
            with tf.control_dependencies(before):
                check = raise_unless(
                    is_finite, findings, "a gradient", device, self._cutting.num_slices
                )
            before = [check]
            for guard in self._both:
                if guard.graph is graph:
                    wait_for(guard, check)
        with tf.control_dependencies(before):
            self.passed_backward = [tf.no_op()] if before else []

    def input_grads(self, grads: Grads) -> Grads:
        """Returns checked input gradients; weights' gradients wait for that check, too."""
        first = self._traced[0]
        if self._policy in OF_GRADIENTS and any(grad is not None for grad in grads):
            findings = [
                self._input_finding(number, grad)
                for number, grad in enumerate(grads)
                if grad is not None
            ]
            device, slices = first.stage.device, self._cutting.num_slices
            with tf.device(device):
                is_finite = tf.reduce_all(tf.stack([f.note < 0 for f in findings]))
            check = raise_unless(is_finite, findings, "a gradient", device, slices)
            (guard,) = self.passed_backward
            wait_for(guard, check)
        return pin_behind(self.passed_backward, grads, first.stage.device)

    def _findings(self, direction: Direction, number: int, notes: Notes) -> list[Finding]:
        what = "its output" if direction == "forward" else "a gradient"
        rest = f"microbatch {MICROBATCH}, {direction}: {what}"
        stage, probes = self._traced[number].stage, self._probes[direction][number]
        return [
            Finding(note, [place(stage, p.layers, rest, r) for p in probes if p.replica == r])
            for r, note in enumerate(notes[number])
        ]

    def _total_finding(self, number: int, grads: Grads) -> Finding:
        traced = self._traced[number]
        stage, layers = traced.stage, traced.replicas[0].probes.theta_layers
        present = [
            (grad, users, device or stage.device)
            for grad, users, device in itertools.zip_longest(grads, layers, stage.theta_devices)
            if grad is not None
        ]
        # On the device of each tensor, so that a flag travels instead of a gradient.
        at = [device for *_, device in present]
        with tf.device(stage.device):
            note = first_not_finite([[g] for g, *_ in present], at) if present else empty_note()
        text = "backward: a gradient of shape {}, summed over the microbatches,"
        places = [place(stage, users or (), text.format(g.shape)) for g, users, _ in present]
        return Finding(note, places)

    def _input_finding(self, number: int, grad: tf.Tensor) -> Finding:
        traced, cutting = self._traced[0], self._cutting
        of_slices = cutting.is_sliced(grad.shape)
        kept = [cutting.batch_dim, *([cutting.sequence_dim] if of_slices else [])]
        rest = [dim for dim in range(grad.shape.rank) if dim not in kept]
        with tf.device(traced.stage.device):
            real = tf.math.abs(grad) if grad.dtype.is_complex else grad
            bad = tf.reduce_any(tf.logical_not(tf.math.is_finite(real)), axis=rest)
            slice_number: tf.Tensor | int = 0
            if of_slices:
                rows = bad if cutting.batch_dim < cutting.sequence_dim else tf.transpose(bad)
                bad = tf.reduce_any(rows, axis=1)
                row = rows[tf.argmax(tf.cast(bad, tf.float32))]
                position = tf.argmax(tf.cast(row, tf.float32))
                begins = tf.constant(list(itertools.accumulate(cutting.slice_lengths))[:-1])
                passed = tf.cast(begins, tf.int64) <= position
                slice_number = tf.reduce_sum(tf.cast(passed, tf.int64))
            # GPUs have no kernel of `ArgMax` for integers.
            # The number of the part; notes have the same form, `piece * replicas + replica`.
            where = tf.argmax(tf.cast(bad, tf.float32)) // cutting.part_size
            if cutting.num_slices > 1:
                replica = tf.math.floormod(where, cutting.replicas)
                microbatch = where // cutting.replicas
                where = (
                    microbatch * cutting.num_slices + slice_number
                ) * cutting.replicas + replica
            note = tf.where(tf.reduce_any(bad), where, empty_note())
        text = f"microbatch {MICROBATCH}, backward: the gradient of input {number}"
        layers = traced.replicas[0].probes.input_layers[number]
        return Finding(
            note,
            [place(traced.stage, layers, text, replica) for replica in range(cutting.replicas)],
        )


def place(stage: Stage, layers: Sequence[str], rest: str, replica: int = 0) -> str:
    """Returns the names of stage, device and layers."""
    name = ", ".join(stage.of_home.replica(replica))
    device = f" ({name})" if name else ""
    layer = f", layer {' or '.join(map(repr, layers))}" if layers else ""
    return f"stage {stage.name!r}{device}{layer}, {rest}"


class Run:
    """One run of a schedule: prepares stages, performs actions and collects gradients."""

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        schedule: Schedule,
        step: tf.Tensor | None,
        options: Options,
        performer: Callable[..., Performer] | None = None,  # by default `ActionByAction` or `Loop`
    ) -> None:
        if tf.executing_eagerly():
            raise PipelineError("a pipeline is part of a graph; call it inside a tf.function")
        if schedule.num_stages != len(stages):
            raise ScheduleError(
                f"the schedule has {schedule.num_stages} stages, but {len(stages)} were given"
            )
        check_sliced(stages, schedule)
        check_threads(len({device for stage in stages for device in stage.devices}))
        inputs = [tf.convert_to_tensor(t) for t in inputs]
        # A variable is read once.
        stages = [
            dataclasses.replace(stage, theta=[tf.convert_to_tensor(t) for t in stage.theta])
            for stage in stages
        ]
        replicas = num_replicas(stages, schedule.stage_devices, schedule.num_slices)
        dims = options.batch_dim, options.sequence_dim
        cutting = cutting_of(inputs, schedule, *dims, replicas, options.slice_lengths)
        if cutting.lengths and options.loop:
            raise PipelineError(
                f"loop=True, and the slices have {', '.join(map(str, cutting.lengths))} positions; "
                "a loop has one shape for all of them. Use loop=None or False, or slices of one "
                "length, such as seq1f1b:4"
            )
        # Options choose a performer unless one is given.
        policy = options.check_numerics
        assert policy is not None
        # From here on a slice of a microbatch counts as a microbatch.
        self.schedule = schedule.by_pieces()
        self._given = schedule
        self.num_slices = schedule.num_slices
        self._loss_scale = options.loss_scale
        self._has_clock = options.clock is not None
        if any(stage.recurrent for stage in stages):
            check_descending(schedule)
        if cutting.num_slices > 1:
            stages = [starting_anew(stage) if stage.recurrent else stage for stage in stages]
        with tf.device(stages[0].device):
            held = [
                _held(t, None if i in options.uncast_inputs else options.compute_dtype)
                for i, t in enumerate(inputs)
            ]
        scaled = unchecked_gradients() if options.loss_scale else contextlib.nullcontext()
        # One for all slices, or one for each if they differ in length.
        self.machines: list[Machine] = []
        frozen = [_frozen(stage, options.compute_dtype) for stage in stages]
        with scaled:
            for of_slice in cutting.of_slices:
                before = self.machines[-1] if self.machines else None
                self.machines.append(
                    Machine(
                        frozen if before is None else _continued(frozen, before),
                        schedule,
                        held,
                        of_slice,
                        step,
                        [[_sum_dtype(t) for t in stage.theta] for stage in stages],
                        options,
                        any(is_differentiable(t) and not is_stopped(t) for t in inputs),
                        before,
                    )
                )
        self.machine = self.machines[0]
        _check_alike(self.machines, schedule.is_forward_only)
        _share_fetched(self.machines)
        self.stages = stages
        self._stages = self.machine.stages
        # The tensors that get gradients.
        self.sources = [
            Sources(inputs, stages[0].device, lambda grads: self.checks.input_grads(grads)),
            *(
                Sources([[*stage.theta, *traced.captured][i] for i in numbers], device)
                for stage, traced in zip(stages, self.machine.traced, strict=True)
                for device, numbers in _by_place(traced.stage)
            ),
            *(Sources(stage.carry, stage.device) for stage in self.recurrent(stages)),
        ]
        for traced in itertools.chain(*(machine.traced for machine in self.machines)):
            for place, device in enumerate(traced.stage.devices):
                nodes = list(traced.nodes(place))
                check_kernels(traced.stage.name, device, nodes)
                if options.strict_devices:
                    check_devices(traced.stage.name, device, nodes)
        self.last_specs = self.machine.traced[-1].output_specs
        for machine in self.machines:
            check_joined(machine.traced[-1], machine.cutting, step is not None)
            for traced in machine.traced:
                traced.check_pure()
        self.checks = Checks(policy, self.machine)
        state = State.before(self._stages, schedule.stage_devices)
        self.modes = modes_of(options.remat, self.schedule)
        arguments = (self.machine, state, self.modes)
        order = tuple(map(schedule.as_piece, execution_order(schedule)))
        self.order: Sequence[Action] = order
        self._values: Performer
        if performer is not None:
            self._values = performer(*arguments)
            return
        is_loop = options.loop if not cutting.lengths else False
        if is_loop is None:
            num_nodes = cutting.num_pieces * sum(t.num_nodes() for t in self.machine.traced)
            is_loop = loop_pays(order, self.modes, num_nodes)
        self._values = (
            Loop(*arguments, order) if is_loop else ActionByAction(*arguments, self.machines)
        )

    def phases(self) -> tuple[Sequence[Action], Sequence[Action]]:
        """Returns the forward and the backward actions; raises if they are mixed on a device."""
        check_phases(self._given)
        forwards = [action for action in self.order if action.kind == "F"]
        return forwards, self.order[len(forwards) :]

    @property
    def state(self) -> State:
        """The state of stages and devices."""
        return self._values.state

    def perform(self, actions: Sequence[Action]) -> None:
        """Performs actions in order."""
        self._values.perform(actions)

    def finish_carries(self, checks: Sequence[tf.Operation]) -> None:
        """Makes the carries wait for checks, and collects the summaries in them."""
        for number, traced in enumerate(self.machine.traced):
            carry = pin_behind(checks, self.state.carries[number], traced.stage.device)
            if traced.summaries is not None:
                traced.summaries.collect(carry.pop())
            # A state that is reset for each microbatch is not a result of the pipeline.
            ends = traced.stage.recurrent and not self._hands_out(traced.stage)
            self.state.carries[number] = [] if ends else carry

    def outputs(self) -> list[tf.Tensor]:
        """Returns the last stage's outputs for the whole batch."""
        outputs = self._values.outputs()
        return self._after_clock(outputs, self._stages[-1].device)

    def _after_clock(
        self, tensors: list[MaybeTensor], devices: str | Sequence[str]
    ) -> list[MaybeTensor]:
        """Ties a clock's last stamps to results; TensorFlow prunes operations without a user."""
        tokens = [op for home in self.state.tokens for token in home for op in token]
        return pin_behind(tokens if self._has_clock else [], tensors, devices)

    def recurrent(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values of the recurrent stages whose state is a result."""
        return [v for v, stage in zip(values, self._stages, strict=True) if self._hands_out(stage)]

    def _hands_out(self, stage: Stage) -> bool:
        """Returns True if a stage's carry after the last microbatch is a result."""
        return stage.recurrent and self.num_slices == 1

    def seed(self, output_grads: Grads, state_grads: Grads) -> None:
        """Starts a backward pass; a run may have several, each with its own."""
        if self._loss_scale is not None:
            output_grads, state_grads = map(self._scaled, (output_grads, state_grads))
        self._values.seed(output_grads)
        self.state.backward_notes = empty_notes(self._stages)
        gradients = iter(state_grads)
        for number, stage in enumerate(self._stages):
            self.state.accumulators[number] = None
            # Summaries, which come last, have no gradient.
            self.state.carry_grads[number] = [
                next(gradients) if self._hands_out(stage) and t.dtype != tf.string else None
                for t in stage.carry
            ]

    def seed_loss(self) -> None:
        """Gives every microbatch's loss the gradient 1, or the scale of the loss."""
        with tf.device(self._stages[-1].device):
            one = tf.ones([], self.last_specs[0].dtype)
            if self._loss_scale is not None:
                (one,) = self._scaled([one])
        # The loss is inside the pipeline, which only a table allows.
        assert isinstance(self._values, ActionByAction | Loop)
        self._values.seed_all([one, *[None] * (len(self.last_specs) - 1)])

    def _scaled(self, grads: Grads) -> Grads:
        assert self._loss_scale is not None
        scale = self._loss_scale.value
        return [
            None if g is None else tf.cast(tf.cast(g, scale.dtype) * scale, g.dtype) for g in grads
        ]

    def gradients(self, factor: tf.Tensor | None = None) -> list[Grads]:
        """Returns the gradients of all sources, multiplied by `factor`, in their dtypes."""
        totals = []
        for number, stage in enumerate(self._stages):
            totals.append(self.machine.total_gradients(number, self.state))
            if self._hands_out(stage):
                totals[-1] += self.state.carry_grads[number]
        self.checks.backward(totals, self.state.backward_notes)
        for number, stage in enumerate(self._stages):
            num_states = len(totals[number]) - len(stage.theta)
            devices = [*stage.theta_devices, *[stage.device] * num_states]
            checked = pin_behind(self.checks.passed_backward, totals[number], devices)
            totals[number] = self._after_clock(checked, devices)
        of_inputs = self._values.input_grads()
        of_inputs = self._after_clock(of_inputs, self._stages[0].device)
        of_theta = [
            [grads[i] for i in numbers]
            for grads, stage in zip(totals, self._stages, strict=True)
            for _, numbers in _by_place(stage)
        ]
        of_states = [
            grads[len(stage.theta) :] for grads, stage in zip(totals, self._stages, strict=True)
        ]
        groups = [of_inputs, *of_theta, *self.recurrent(of_states)]
        if self._loss_scale is not None:
            scale = self._loss_scale.value
            factor = 1 / scale if factor is None else tf.cast(factor, scale.dtype) / scale
        for group, source in zip(groups, self.sources, strict=True):
            with tf.device(source.device):
                for i, (grad, tensor) in enumerate(zip(group, source.tensors, strict=True)):
                    if grad is not None:
                        grad = tf.cast(grad, tensor.dtype)
                        group[i] = grad if factor is None else grad * tf.cast(factor, grad.dtype)
        return groups if self._loss_scale is None else self._loss_scale.checked(groups)


def _held(tensor: tf.Tensor, compute_dtype: tf.DType | None) -> tf.Tensor:
    """Returns an input without a gradient, in the dtype of computation."""
    held = tf.stop_gradient(cast_floating(tensor, compute_dtype))
    if tf.compat.v1.executing_eagerly_outside_functions() or not is_constant(tensor):
        return held
    # The optimizer of a TF1 session would fold a constant, and leave nodes without some of their
    # inputs where microbatches are joined. The optimizer does not treat this tensor as a constant.
    return tf.compat.v1.placeholder_with_default(held, held.shape)


def _sum_dtype(weight: tf.Tensor) -> tf.DType | None:
    """Returns the dtype of the sum of a weight's gradients; None if it gets none."""
    return None if is_stopped(weight) else sum_dtype(weight.dtype)


def _check_alike(machines: Sequence[Machine], is_forward_only: bool) -> None:
    """Checks that all slices use the same weights, whose gradients are summed over slices."""
    first = machines[0]
    for machine in machines[1:]:
        for traced, other in zip(first.traced, machine.traced, strict=True):
            weights = [[*map(id, each.captured_from)] for each in (traced, other)]
            present = [[g is not None for g in each.gradients.of_theta] for each in (traced, other)]
            differ = present[0] != present[1] and not is_forward_only
            if weights[0] != weights[1] or differ:
                raise PipelineError(
                    f"stage {traced.given.name!r} uses other weights in a later slice of sequences "
                    "than in the first one, and slices of different lengths sum their gradients. "
                    "Use the same weights in each slice, or slices of one length, such as seq1f1b:4"
                )


def _share_fetched(machines: Sequence[Machine]) -> None:
    """Lets all slices take the weights that the first one has fetched, where they join them in the
    same way; else actions fetch for themselves.
    """
    for of_slices in zip(*(machine.traced for machine in machines), strict=True):
        first = of_slices[0].joined_from()
        if any(traced.joined_from() != first for traced in of_slices[1:]):
            for traced in of_slices:
                traced.fetch_for_each_action()


def _continued(stages: Sequence[Stage], before: Machine) -> list[Stage]:
    """Returns the stages for the slice after that of a machine, whose carry they get."""
    continued: list[Stage] = []
    for stage, traced in zip(stages, before.traced, strict=True):
        if stage.recurrent:
            names = traced.carry_out[: traced.num_handed_on]
            places = traced.carry_out_places[: traced.num_handed_on]
            carry = [traced.spec(name) for name in names]
            stage = dataclasses.replace(stage, carry=carry, carry_places=places)
        continued.append(stage)
    return continued


def _frozen(stage: Stage, compute_dtype: tf.DType | None) -> Stage:
    """Returns the stage with tensors without a gradient, in the dtype of computation."""
    dtypes = stage.dtypes or [compute_dtype] * len(stage.theta)
    theta = []
    for t, dtype, device in zip(stage.theta, dtypes, stage.theta_devices, strict=True):
        with tf.device(device):
            theta.append(tf.stop_gradient(cast_floating(t, dtype)))
    with tf.device(stage.device):
        carry = [
            t if isinstance(t, tf.TensorSpec) else tf.stop_gradient(tf.convert_to_tensor(t))
            for t in stage.carry
        ]
    return dataclasses.replace(stage, theta=theta, carry=carry)


def _by_place(stage: Stage) -> list[tuple[str, list[int]]]:
    """Returns the first device, and each other with weights, with the indices of its weights."""
    return [
        (stage.devices[place], [i for i, owner in enumerate(stage.owners) if owner == place])
        for place in sorted({0, *stage.owners})
    ]


def loop_pays(
    order: Sequence[Action], modes: Mapping[tuple[int, int], Mode], num_nodes: int
) -> bool:
    """Returns True if one loop is better than `num_nodes` separate operations for all actions."""
    kinds = {(a.kind, a.stage, modes[a.stage, a.microbatch].name) for a in order}
    of_action = num_nodes / max(1, len(order))
    nodes = num_nodes + _OWN_NODES * len(order)
    is_large = nodes > LOOP_ABOVE or (
        of_action >= _LARGE_ACTION and num_nodes > LOOP_LARGE_ACTIONS_ABOVE
    )
    return is_large and 2 * len(kinds) * (of_action + _OWN_NODES_IN_LOOP) <= nodes


def with_loss(stage: Stage) -> Stage:
    """Returns the last stage with a gradient of its first output only.

    Other outputs would get a gradient of zeros, and zero times infinity is NaN.
    """

    def forward(*args: Any) -> Any:
        outputs, carry = stage.forward(*args)
        return [*outputs[:1], *map(tf.stop_gradient, outputs[1:])], carry

    return dataclasses.replace(stage, forward=forward)
