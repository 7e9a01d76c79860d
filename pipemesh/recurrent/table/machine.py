"""Performs single actions of a schedule on the devices of their stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from pipemesh.backend.graphs import keep_alive
from pipemesh.backend.operations import (
    MaybeTensor,
    on_each,
    pin,
    pin_each,
    pin_present,
    sum_in_order,
    zeros,
)
from pipemesh.backend.structure import is_differentiable
from pipemesh.randomness.scope import WholeDraws
from pipemesh.recurrent.options import Options, sum_dtype
from pipemesh.recurrent.passes.compiling import Compiler
from pipemesh.recurrent.passes.passes import Passes, by_name, weight_sums
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import specs_of, whole_draws
from pipemesh.recurrent.remat import FULL, NONE, Mode
from pipemesh.recurrent.stage import Grads, Stage, Tensors
from pipemesh.recurrent.watch.finite_values import LOCATING, Direction, Probe, empty_note
from pipemesh.schedule import Schedule
from pipemesh.schedule.action import EFFECTS, GRADS, KEPT, OUTPUTS, PENDING, REMADE


class Channel(NamedTuple):
    """A kind of value of a stage: a list of tensors for each microbatch, ordered by replica.

    The outputs of stage -1 are the pipeline's inputs. The gradients of the inputs of the stage
    after the last one come from the loss.
    """

    kind: str
    stage: int


def channels_read(kind: str, stage: int, is_recomputed: bool) -> list[Channel]:
    """Returns the channels that an action reads; `is_recomputed` if an `R` comes before it."""
    return [Channel(name, stage + step) for name, step in EFFECTS[kind].taken(is_recomputed)]


def channels_written(kind: str, stage: int) -> list[Channel]:
    """Returns the channels that an action of a kind writes."""
    return [Channel(name, stage + step) for name, step in EFFECTS[kind].gives]


Tokens = list[list[list[tf.Operation]]]


@dataclasses.dataclass
class State:
    """The state of stages and devices between their actions; lists have an entry for each stage."""

    carries: list[Tensors]
    carry_grads: list[Grads]  # of recurrent stages
    accumulators: list[Tensors | None]  # sums of weights' gradients; None before the first
    tokens: Tokens  # for each home and device, the operations that end its latest action
    # where a value was not finite, by replica; see `finite_values`
    forward_notes: list[Tensors]
    backward_notes: list[Tensors]

    @classmethod
    def before(cls, stages: Sequence[Stage], stage_devices: Sequence[int]) -> State:
        """Returns the state before the first action."""
        sizes = {home: len(s.devices) for home, s in zip(stage_devices, stages, strict=True)}
        return cls(
            carries=[list(stage.carry) for stage in stages],
            carry_grads=[[None] * len(stage.carry) for stage in stages],
            accumulators=[None] * len(stages),
            tokens=[[[] for _ in range(sizes[home])] for home in sorted(sizes)],
            forward_notes=empty_notes(stages),
            backward_notes=empty_notes(stages),
        )

    def forget_tokens_of_other_graphs(self) -> None:
        """Drops tokens of other graphs: an eager function's gradient has its own, run later."""
        graph = tf.compat.v1.get_default_graph()
        self.tokens = [
            [[op for op in token if op.graph is graph] for token in home] for home in self.tokens
        ]


def empty_notes(stages: Sequence[Stage]) -> list[Tensors]:
    """Returns notes for stages whose values are all finite."""
    return [[empty_note() for _ in range(stage.of_home.num_replicas)] for stage in stages]


class Values(Protocol):
    """The values of one action: those of its microbatch, and the state."""

    @property
    def state(self) -> State:
        """The state before the action; the action changes it."""
        ...

    def read(self, kind: str, stage: int) -> list[Any]:
        """Returns a value of the microbatch."""
        ...

    def write(self, kind: str, stage: int, value: Sequence[tf.Tensor | None]) -> None:
        """Stores a value for a later action."""


class Key(NamedTuple):
    """The kind of a value, its stage, and the mode of remat that it depends on."""

    kind: str
    stage: int
    mode: Mode


def key_of(channel: Channel, mode: Mode = FULL) -> Key:
    """Returns the key of a channel; only KEPT and PENDING depend on the mode."""
    return Key(*channel, mode if channel.kind in (KEPT, PENDING) else FULL)


class Weight(NamedTuple):
    """A weight of one replica, as actions take it."""

    tensor: tf.Tensor
    place: int  # the index in the home of its device
    target: int  # of the device of the actions
    is_fetched: bool  # whether each action fetches it from its device


def of_every_replica(stage: Stage) -> list[tf.Tensor]:
    """Returns the weights of each replica, copied once per step unless they are fetched."""
    home, thetas = stage.of_home, list[tf.Tensor]()
    for replica in range(home.num_replicas):
        for i, tensor in enumerate(stage.theta):
            place = replica * home.group + stage.theta_places[i]
            if place in stage.holders(i) and place != stage.owners[i]:
                with tf.device(home.devices[place]):
                    tensor = tf.identity(tensor)
            thetas.append(tensor)
    return thetas


def weights_of(traced: TracedStage, thetas: Sequence[tf.Tensor]) -> list[Weight]:
    """Returns the weights of each replica of a stage, given those `of_every_replica`.

    Actions share the fetched weights of a stage that `keeps_fetched`: these are fetched and joined
    here, once, and exist until the last action that takes them.
    """
    stage = traced.stage
    targets = [*map(traced.place, traced.weights)]
    if traced.keeps_fetched:
        tensors = traced.join(thetas)
        return [Weight(t, at, at, False) for t, at in zip(tensors, targets, strict=True)]
    weights = list[Weight]()
    for number, (tensor, target) in enumerate(zip(thetas, targets, strict=True)):
        i = number % len(stage.theta)
        is_fetched = i in stage.fetched
        place = stage.owners[i] if is_fetched else target
        weights.append(Weight(tensor, place, target, is_fetched))
    return weights


def for_action(
    weights: Sequence[Weight],
    devices: Sequence[str],  # of the home
    tokens: Sequence[Sequence[tf.Operation]],  # of the home
    guards: bool,
) -> list[tf.Tensor]:
    """Returns the weights for one action, which are dead if it `guards` and the tokens are.

    Owners send the fetched ones. An operation of the owner waits until the device of the action is
    free: TensorFlow sends a tensor as soon as it exists, and only once to each device.
    """
    # By device, and device that it waits for.
    guarded: dict[tuple[int, int], list[int]] = {}
    fetched: dict[tuple[int, int], list[int]] = {}
    for number, weight in enumerate(weights):
        if guards:
            guarded.setdefault((weight.place, weight.place), []).append(number)
        if weight.is_fetched:
            fetched.setdefault((weight.place, weight.target), []).append(number)
    pinned = [weight.tensor for weight in weights]
    for (place, busy), numbers in (*guarded.items(), *fetched.items()):
        with tf.device(devices[place]), tf.control_dependencies(tokens[busy]):
            tensors = pin([pinned[number] for number in numbers])
        for number, tensor in zip(numbers, tensors, strict=True):
            pinned[number] = tensor
    return pinned


# Operations whose results are known before anything runs.
_CONSTANT = ("Const", "Fill")


class Machine:
    """The stages of a pipeline, ready to act."""

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
        step: tf.Tensor | None,
        # of the sums of each stage's weights' gradients; None for a frozen weight
        accumulator_dtypes: Sequence[Sequence[tf.DType | None]],
        options: Options,
        to_inputs: bool = True,  # whether the inputs get gradients
        before: Machine | None = None,  # of another slice, with the same weights
    ) -> None:
        self.stage_devices = schedule.stage_devices  # for each stage its row of the schedule
        self.inputs = inputs
        self.cutting = cutting
        self._guards = False
        self.step = tf.constant(0, tf.int64) if step is None else tf.cast(step, tf.int64)
        self._clock = options.clock
        if before is not None:
            self.compiler = before.compiler
        else:
            self.compiler = Compiler() if options.compile else None
        self._stamp: Callable[..., tf.Operation] | None = None
        frozen = [[i for i, d in enumerate(of) if d is None] for of in accumulator_dtypes]
        self.traced = self._trace(
            stages, step is not None, schedule.is_forward_only, frozen, to_inputs
        )
        self._stages = self.stages = [traced.stage for traced in self.traced]
        self.sums = [
            weight_sums(traced, [*dtypes, *(sum_dtype(t.dtype) for t in traced.captured)])
            for dtypes, traced in zip(accumulator_dtypes, self.traced, strict=True)
        ]
        self.probes: dict[Direction, list[list[Probe]]] = {
            direction: [[] for _ in self.traced] for direction in LOCATING
        }
        if options.check_numerics in LOCATING["forward"]:
            self.probes["forward"] = [traced.forward_probes() for traced in self.traced]
        if options.check_numerics in LOCATING["backward"]:
            self.probes["backward"] = [
                traced.backward_probes(number == 0) for number, traced in enumerate(self.traced)
            ]
        self._thetas: list[list[tf.Tensor]]
        # By stage. Those of stages that keep what they fetch belong to one graph.
        self._weights: dict[int, tuple[tf.Graph, list[Weight]]]
        if before is None:
            self._thetas = [of_every_replica(stage) for stage in self._stages]
            self._weights = {}
        else:
            self._thetas, self._weights = before._thetas, before._weights
        self._passes: dict[tuple[int, Mode], Passes] = {}
        keep_alive(self)

    def _trace(
        self,
        stages: Sequence[Stage],
        has_step: bool,
        is_forward_only: bool,
        frozen: Sequence[Sequence[int]],
        to_inputs: bool,
    ) -> list[TracedStage]:
        """Traces the stages one after the other, each with the output shapes of the last."""
        cutting, whole = self.cutting, specs_of(self.inputs)
        of_stages = enumerate(whole_draws(stages, whole, has_step, cutting))
        specs = [*map(cutting.of_part, whole)]
        places = [0] * len(specs)
        traced: list[TracedStage] = []

        def draws_of(stage: int) -> WholeDraws:
            return next(draws for number, draws in of_stages if number == stage)

        for number, stage in enumerate(stages):
            places = stage.input_places(places)
            draws = functools.partial(draws_of, number)
            # Else a device would hold the weights of several stages at once.
            is_alone = self.stage_devices.count(self.stage_devices[number]) == 1
            traced.append(TracedStage(stage, specs, cutting, has_step, draws, places, is_alone))
            specs, places = traced[-1].output_specs, traced[-1].output_places
        # A tensor without an incoming gradient gets none, not zeros.
        live: Sequence[int] = range(0 if is_forward_only else len(specs))
        # Below the lowest weight that gets a gradient, nothing does.
        needed = [to_inputs]
        for traced_stage, of_stage in zip(traced, frozen, strict=True):
            theta = enumerate(traced_stage.stage.theta)
            gets_gradient = any(is_differentiable(t) and i not in of_stage for i, t in theta)
            needed.append(needed[-1] or gets_gradient or traced_stage.stage.recurrent)
        below = reversed([*zip(traced, frozen, needed[:-1], strict=True)])
        for traced_stage, of_stage, to_stage in below:
            traced_stage.differentiate(live, of_stage, to_stage)
            of_inputs = traced_stage.gradients.of_inputs[: len(traced_stage.replicas[0].inputs)]
            live = [i for i, grad in enumerate(of_inputs) if grad is not None]
        return traced

    def passes(self, stage: int, mode: Mode) -> Passes:
        """Returns the functions of a stage under a mode of remat."""
        if (stage, mode) not in self._passes:
            traced = self.traced[stage]
            self._passes[stage, mode] = Passes(
                traced,
                mode.recomputed(traced),
                self.sums[stage],
                self.probes["forward"][stage],
                self.probes["backward"][stage],
                mode.is_twice,
                is_first=stage == 0,
                compiler=self.compiler,
            )
        return self._passes[stage, mode]

    def act(self, kind: str, stage: int, mode: Mode, microbatch: tf.Tensor, values: Values) -> None:
        """Performs one action, whose microbatch (int64 scalar) is a piece if there are slices."""
        state, traced, scalars = values.state, self.traced[stage], [microbatch, self.step]
        passes = self.passes(stage, mode if kind in "FR" else mode.backward)
        if self._guards:
            with tf.control_dependencies(state.tokens[self.stage_devices[stage]][0]):
                scalars = pin(scalars)
        if self._clock is not None:
            self._stamp = functools.partial(self._clock.stamp, kind, stage, microbatch)
        arguments = self._arguments(kind, passes, stage, values, mode.is_apart)
        weights = self._weights_for_action(stage, state)
        notes = state.forward_notes if kind == "F" else state.backward_notes
        sums = state.accumulators[stage] if kind in "BW" else None
        results = passes.run(kind, weights, arguments, scalars, notes[stage], sums)
        notes[stage] = by_name(results, passes.note_names)
        ends: list[tuple[Grads, Sequence[int]]] = []

        def pinned(tensors: list[Any], places: Sequence[int]) -> list[Any]:
            ends.append((self._pin(stage, tensors, places, state), places))
            return ends[-1][0]

        if kind in "BW":
            sums = by_name(results, passes.sum_names)
            state.accumulators[stage] = pinned(sums, [total.place for total in passes.sums])
        for channel in channels_written(kind, stage):
            names = self.names(*channel, mode)
            made = traced.gradients.of_inputs if channel.kind == GRADS else names
            tensors = by_name(results, made)
            # No token waits for the gradients of the pipeline's inputs, so TensorFlow prunes them
            # if they are not used.
            if channel.kind != KEPT and channel != Channel(GRADS, 0):
                tensors = pinned(tensors, [*map(traced.place, names)])
            values.write(*channel, tensors)
        if kind in "BI":
            carried = self._filled(stage, by_name(results, traced.gradients.of_carry))
            state.carry_grads[stage] = pinned(carried, traced.carry_places)
        if kind == "F":
            carry = by_name(results, traced.carry_out)
            state.carries[stage] = pinned(carry, traced.carry_out_places)
            # The carry from replica to replica delays only the operations that use it.
            if len(traced.replicas) > 1 and not traced.given.recurrent:
                ends.pop()
        self._finish(stage, state, ends)

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """Makes actions depend on their tokens: an action with dead tokens computes nothing."""
        self._guards = True
        try:
            yield
        finally:
            self._guards = False

    @contextlib.contextmanager
    def acting(self, name: str, stage: int) -> Iterator[None]:
        """Names operations made inside after an action, on its stage's first device."""
        with tf.name_scope(name), tf.device(self._stages[stage].device):
            yield

    def _pin(
        self, stage: int, tensors: list[MaybeTensor], places: Sequence[int], state: State
    ) -> list[MaybeTensor]:
        """Pins tensors that are not None, each on its device."""
        devices = self._stages[stage].devices
        if not self._guards:
            return pin_each(tensors, [devices[place] for place in places])
        # Without it, a result that depends on no argument of the action would stay alive.
        return self._behind_tokens(stage, tensors, places, state)

    def _arguments(
        self, kind: str, passes: Passes, stage: int, values: Values, is_recomputed: bool
    ) -> Tensors:
        """Returns the tensors that an action starts from, besides weights, through gates.

        A stage that is recomputed in its backward pass has two gates, so that recomputation may
        start before the gradient arrives. Constant gradients go through the first gate. Else
        TensorFlow would compute the nodes that depend on them before the first step, and keep these
        for every microbatch.
        """
        state, tensors, late = values.state, list[tf.Tensor](), list[int]()
        for channel in channels_read(kind, stage, is_recomputed):
            if channel.kind != GRADS:
                tensors += values.read(*channel)
                continue
            grads, count = self._result_grads(stage, values), len(tensors)
            if passes.cuts.recomputes:
                late = [i for i, g in enumerate(grads, count) if g.op.type not in _CONSTANT]
            tensors += grads
        carry = state.carries[stage] if kind == "F" else []
        names = passes.cuts.arguments(kind)[len(carry) :]
        places = [*map(self.traced[stage].place, names)]
        for chosen in ([i for i in range(len(tensors)) if i not in late], late):
            given, at = [tensors[i] for i in chosen], [places[i] for i in chosen]
            gated = self._behind_tokens(stage, given, at, state, starts=True)
            for i, tensor in zip(chosen, gated, strict=True):
                tensors[i] = tensor
        return [*carry, *tensors]

    def fetch(self) -> None:
        """Makes the weights of all stages for actions of the current graph, before the first one.

        A phase whose graph is another one fetches again: else its weights would be a result of the
        graph before, and be held between the two.
        """
        graph = tf.compat.v1.get_default_graph()
        for number, traced in enumerate(self.traced):
            known, _ = self._weights.get(number, (None, []))
            if known is None or (traced.keeps_fetched and known is not graph):
                self._weights[number] = graph, weights_of(traced, self._thetas[number])

    def _weights_for_action(self, stage: int, state: State) -> Tensors:
        """Returns the weights of each replica, for one action."""
        tokens = state.tokens[self.stage_devices[stage]]
        _, weights = self._weights[stage]
        return for_action(weights, self._stages[stage].devices, tokens, self._guards)

    def _result_grads(self, stage: int, values: Values) -> Tensors:
        """Returns the gradients of all floating results of a stage, zeros for missing ones."""
        traced = self.traced[stage]
        arrived = values.read(GRADS, stage + 1)
        grads = []
        for i in traced.gradients.of_outputs:
            spec = traced.output_specs[i % len(traced.output_specs)]
            grad = arrived[i]
            grads.append(tf.zeros(spec.shape, spec.dtype) if grad is None else grad)
        carried = values.state.carry_grads[stage]
        for i in traced.gradients.of_carry_out:
            grad = carried[i]
            if grad is None:
                spec = traced.spec(traced.carry_out[i])
                with tf.device(self._stages[stage].devices[traced.carry_out_places[i]]):
                    grad = tf.zeros(spec.shape, spec.dtype)
            grads.append(grad)
        return grads

    def _filled(self, stage: int, carry_grads: Grads) -> list[Any]:
        """Returns the gradients of a recurrent stage's carry, zeros for missing ones."""
        filled = list(carry_grads)
        for i in self.traced[stage].gradients.of_carry_out:
            # A stage that is traced for each slice may hand on more than it gets.
            if i < len(filled) and filled[i] is None:
                device = self._stages[stage].devices[self.traced[stage].carry_places[i]]
                with tf.device(device):
                    filled[i] = tf.zeros_like(self._stages[stage].carry[i])
        return filled

    def _behind_tokens(
        self,
        stage: int,
        tensors: list[MaybeTensor],
        places: Sequence[int],
        state: State,
        starts: bool = False,
    ) -> list[MaybeTensor]:
        """Pins tensors on their devices, behind the tokens of these and the stamp of a start."""
        home, pinned = state.tokens[self.stage_devices[stage]], [*tensors]
        for number, device in enumerate(self._stages[stage].devices):
            chosen = [i for i, place in enumerate(places) if place == number]
            if not chosen:
                continue
            with tf.device(device):
                with tf.control_dependencies(home[number]):
                    results = pin_present([tensors[i] for i in chosen])
                if starts and self._stamp is not None:
                    with tf.control_dependencies([t.op for t in results if t is not None]):
                        start = self._stamp(is_end=False, device=device, replica=number)
                    with tf.control_dependencies([start]):
                        results = pin_present(results)
            for i, tensor in zip(chosen, results, strict=True):
                pinned[i] = tensor
        return pinned

    def _finish(
        self, stage: int, state: State, results: Sequence[tuple[Grads, Sequence[int]]]
    ) -> None:
        """Makes each device's results its token for later actions."""
        home = state.tokens[self.stage_devices[stage]]
        for number, device in enumerate(self._stages[stage].devices):
            operations = {
                t.op.name: t.op
                for tensors, places in results
                for t, place in zip(tensors, places, strict=True)
                if place == number and t is not None
            }
            # Without a result, a stamp would have nothing to wait for.
            if self._stamp is not None and operations:
                with tf.control_dependencies(list(operations.values())), tf.device(device):
                    operations["end"] = self._stamp(is_end=True, device=device, replica=number)
            if operations:
                home[number] = list(operations.values())

    def begin(self, stage: int, state: State) -> None:
        """Starts the gradients of a stage with zeros before its first backward action."""
        with tf.device(self._stages[stage].device):
            if state.accumulators[stage] is None:
                state.accumulators[stage] = self.zero_gradients(stage)
            state.carry_grads[stage] = self._filled(stage, state.carry_grads[stage])

    def zero_gradients(self, stage: int) -> Tensors:
        """Returns the sums of the gradients of a stage's weights before the first microbatch."""
        home, sums = self._stages[stage].devices, self.sums[stage]
        devices = [home[total.place] for total in sums]
        return on_each(devices, lambda total: zeros(total.spec), sums)

    def total_gradients(self, stage: int, state: State) -> Grads:
        """Returns the gradient of each theta of a stage, summed over microbatches and replicas."""
        traced, values = self.traced[stage], iter(state.accumulators[stage] or [])
        grads = [None if name is None else next(values) for name in traced.gradients.of_theta]
        count, totals = len(traced.stage.theta), list[Any]()
        for i, device in enumerate(traced.stage.theta_devices):
            part = [g for g in grads[i::count] if g is not None]
            # Gradients of all replicas are summed on the weight's device, once per step.
            with tf.device(traced.stage.device), tf.device(device):
                totals.append(sum_in_order(part) if part else None)
        return totals

    def specs(self, kind: str, stage: int, mode: Mode = FULL) -> list[tf.TensorSpec | None]:
        """Returns shapes and dtypes of the values of a kind."""
        traced = self.traced[stage]
        specs: list[Any] = [*map(traced.spec, self.names(kind, stage, mode))]
        if kind != GRADS:
            return specs
        named = zip(specs, traced.gradients.of_inputs, strict=True)
        return [None if grad is None else spec for spec, grad in named]

    def places(self, kind: str, stage: int, mode: Mode = FULL) -> list[int]:
        """Returns the devices of the home, by number, of the values of a kind."""
        return [*map(self.traced[stage].place, self.names(kind, stage, mode))]

    def arrival_places(self, kind: str, stage: int) -> list[int]:
        """Returns the devices of the user's home, by number, where values of a kind arrive."""
        if kind == OUTPUTS:
            return self.places(GRADS, stage + 1)
        return self.places(OUTPUTS, stage - 1)

    def names(self, kind: str, stage: int, mode: Mode) -> list[str]:
        """Returns the tensors of a kind; for GRADS the inputs that they belong to."""
        if kind == OUTPUTS:
            return self.traced[stage].outputs
        if kind == GRADS:
            return self.traced[stage].inputs
        if kind == REMADE:
            return self.passes(stage, NONE).cuts.kept
        if kind == KEPT:
            return self.passes(stage, mode).cuts.kept
        return self.passes(stage, mode.backward).cuts.pending
