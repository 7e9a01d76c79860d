"""A run that is one loop over the ticks of its table, whose actions are data.

The body of the loop has each kind of action of each home once. Which of them a home performs at
a tick, for which microbatch, and where it finds what it needs, stands in a table of numbers, a row
a tick, so the graph grows with the number of stages only. TensorFlow runs the repetitions of a loop
overlapped, each device as far as its inputs allow, so a tick is no barrier.

An action that is not performed is dead, in TensorFlow's words: of what is made by a `Switch` one
side is not there, and nothing that depends on it is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.functions import without_automatic_order
from pipemesh.backend.operations import MaybeTensor, pin_each
from pipemesh.recurrent.passes.passes import Grads, Tensors
from pipemesh.recurrent.passes.traced_stage import Cutting
from pipemesh.recurrent.remat import FULL, Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.branches import Branching
from pipemesh.recurrent.table.kinds import GRADS, KEPT, OUTPUTS, PENDING, Channel, Kind
from pipemesh.recurrent.table.lists import Key, Lists, nothing
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.program import (
    CLEARS, KEEPS, NOTHING, TAKES, Code, HomeProgram, Memory, Spot, as_table, given, program, taken, user, crosses
)
from pipemesh.recurrent.table.parts import parts
from pipemesh.recurrent.table.state import State
from pipemesh.schedule import Action
from pipemesh.schedule.repeats import Loop

_PARALLEL_ITERATIONS = 128

Name = tuple[Any, ...]


class Ticked:
    """Performs actions as one loop.

    Args:
        machine: performs actions.
        state: what stages hold.
        stages: the stages.
        inputs: of the pipeline, the whole batch.
        cutting: how the batch is cut.
        modes: of remat, for each stage and microbatch.
        order: everything that will be performed, in order.

    Attributes:
        state: what stages hold.
        lists: values that stay on their home.
        memory: where they lie.
        sources: for channels that no action makes a function of the microbatch.
    """

    def __init__(
        self,
        machine: Machine,
        state: State,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
        modes: Mapping[tuple[int, int], Mode],
        order: Sequence[Action],
    ) -> None:
        self.state = state
        self.machine = machine
        self.stages = stages
        self.modes = modes
        self.homes = machine.stage_devices
        self.memory = Memory(order, self.homes, modes, cutting.num_microbatches)
        self.lists = Lists(machine, stages, cutting.num_microbatches)
        self.sources: dict[Channel, Callable[[tf.Tensor], Grads]] = {
            Channel(OUTPUTS, -1): lambda m: parts(inputs, m, cutting)
        }
        self._cutting = cutting
        self._after_forward: dict[Key, Grads] | None = None

    def perform(self, items: Sequence[Action | Loop]) -> None:
        """Performs actions in order; there are no loops among them."""
        actions = [item for item in items if isinstance(item, Action)]
        self.state.forget_tokens_of_other_graphs()
        for stage in {action.stage for action in actions if action.kind != "F"}:
            self.machine.begin(stage, self.state)
        programs, count = program(actions, self.homes, self.modes, self.memory)
        self.machine.guards = True
        try:
            _TickLoop(self, programs, count).run()
        finally:
            self.machine.guards = False

    def seed(self, output_grads: Grads) -> None:
        """Cuts the gradients of the outputs of the whole batch."""
        self._begin_backward(lambda m: parts(output_grads, m, self._cutting))

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        self._begin_backward(lambda m: grads * self._cutting.replicas)

    def _begin_backward(self, source: Callable[[tf.Tensor], Grads]) -> None:
        self.sources[Channel(GRADS, len(self.stages))] = source
        # A second backward pass takes the same values once more.
        if self._after_forward is None:
            self._after_forward = dict(self.lists.handles)
        self.lists.handles = dict(self._after_forward)

    def outputs(self) -> Tensors:
        """Those of the last stage for the whole batch."""
        return self._joined(OUTPUTS, len(self.stages) - 1)

    def input_grads(self) -> Grads:
        """The gradients of the pipeline's inputs."""
        return self._joined(GRADS, 0)

    def _joined(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        joined: list[Any] = self.lists.joined(Lists.key(kind, stage, FULL), self._cutting.batch_dim)
        return joined


@dataclasses.dataclass(frozen=True)
class _Variable:
    """Tensors that go from tick to tick, or from home to home.

    Attributes:
        home: whose predicates choose what becomes of them.
        devices: where they lie.
        places: the numbers of these devices in the home.
    """

    home: int
    devices: list[str]
    places: list[int]
    keeps_shapes: bool = True


class _TickLoop:
    """One loop: its variables, and its body."""

    def __init__(self, run: Ticked, programs: Mapping[int, HomeProgram], count: int) -> None:
        self._run = run
        self._machine = run.machine
        self._stages = run.stages
        self._programs = programs
        self._count = count
        self._home_devices = {
            home: list(stage.devices) for home, stage in zip(run.homes, run.stages, strict=True)
        }
        self._variables: dict[Name, _Variable] = {}
        self._start: dict[Name, Grads] = {}
        self._tables: dict[tuple[int, int], tf.Tensor] = {}
        self._columns: dict[int, dict[Name, int]] = {}
        for home, own in programs.items():
            self._add_home(home, own)

    # Its variables.

    def _add(self, name: Name, start: Sequence[tf.Tensor | None], variable: _Variable) -> None:
        self._variables[name] = variable
        self._start[name] = pin_each(list(start), variable.devices)

    def _at(self, home: int, places: Sequence[int], keeps_shapes: bool = True) -> _Variable:
        devices = self._home_devices[home]
        return _Variable(home, [devices[p] for p in places], [*places], keeps_shapes)

    def _add_home(self, home: int, own: HomeProgram) -> None:
        run, state = self._run, self._run.state
        columns: dict[Name, list[int]] = {("code",): own.code, ("microbatch",): own.microbatch}
        everywhere = self._at(home, range(len(self._home_devices[home])))
        zeros = [_constant(0, tf.int32, d) for d in map(host_of, everywhere.devices)]
        counter = dataclasses.replace(everywhere, devices=[*map(host_of, everywhere.devices)])
        self._add(("counter", home), zeros, counter)
        tokens = []
        for device, operations in zip(everywhere.devices, state.tokens[home], strict=True):
            with tf.control_dependencies(operations), tf.device(device):
                tokens.append(tf.ensure_shape(tf.zeros([]), []))
        self._add(("token", home), tokens, everywhere)
        for code in own.codes:
            for name, tensors, places in self._held(code):
                if any(t is not None for t in tensors):
                    self._add(name, tensors, self._at(home, places))
        for spot, indices in own.indices.items():
            columns["index", spot] = indices
            channel = spot.channel
            key = key_of(spot)
            run.lists.sizes[key] = run.memory.sizes[spot]
            places = self._machine.places(*key)
            if channel in own.arrivals:
                columns["put", channel] = own.arrivals[channel]
                places = self._arrival_places(channel)
                run.lists.elsewhere[key] = [self._home_devices[home][p] for p in places]
                run.lists.handles.pop(key, None)
            run.lists.reserve([key])
            self._add(("list", key), run.lists.handles[key], self._at(home, places))
        for channel, registers in own.registers.items():
            variable = self._at(home, self._arrival_places(channel), keeps_shapes=False)
            for number, column in enumerate(registers):
                columns["register", channel, number] = column
                self._add(
                    ("register", channel, number), self._nothing(channel, variable), variable
                )
            if len(registers) > 1:
                columns["read", channel] = own.reads[channel]
        self._columns[home] = {name: i for i, name in enumerate(columns)}
        table = as_table([*columns.values()])
        for place, device in enumerate(counter.devices):
            self._tables[home, place] = _constant(table, tf.int32, device)

    def _held(self, code: Code) -> list[tuple[Name, Sequence[tf.Tensor | None], list[int]]]:
        """What of the state an action of a kind changes, with where it lies."""
        state, stage = self._run.state, code.stage
        home = self._stages[stage].of_home
        replicas = [replica * home.group for replica in range(home.num_replicas)]
        found: list[tuple[Name, Sequence[tf.Tensor | None], list[int]]] = []
        if code.kind == "F":
            carry = state.carries[stage]
            found.append((("carries", stage), carry, [0] * len(carry)))
            if self._machine.probes["forward"][stage]:
                found.append((("forward", stage), state.notes["forward"][stage], replicas))
        if code.kind in "BI":
            grads = state.carry_grads[stage]
            found.append((("carry_grads", stage), grads, [0] * len(grads)))
            if self._machine.probes["backward"][stage]:
                found.append((("backward", stage), state.notes["backward"][stage], replicas))
        if code.kind in "BW":
            sums = state.accumulators[stage] or []
            places = self._machine.passes(stage, code.mode).accumulator_places
            found.append((("accumulators", stage), sums, places))
        return found

    def _arrival_places(self, channel: Channel) -> list[int]:
        """Where in the home of its user what a channel hands on arrives."""
        stage = user(channel)
        if channel.kind == OUTPUTS:
            return self._machine.input_places(stage)
        return self._machine.places(OUTPUTS, stage)

    def _nothing(self, channel: Channel, variable: _Variable) -> Grads:
        specs = self._machine.specs(channel.kind, channel.stage)
        made: Grads = []
        for spec, device in zip(specs, variable.devices, strict=True):
            with tf.device(device):
                made.append(None if spec is None else nothing(spec.dtype))
        return made

    # Running it.

    def run(self) -> None:
        """Adds the loop to the graph, and hands on what it leaves."""
        names = list(self._variables)

        def flatten(values: Mapping[Name, Grads]) -> list[tf.Tensor]:
            return [t for name in names for t in values[name] if t is not None]

        def pack(flat: Sequence[tf.Tensor]) -> dict[Name, Grads]:
            each = iter(flat)
            return {
                name: [None if t is None else next(each) for t in self._start[name]]
                for name in names
            }

        shapes = [
            t.shape if self._variables[name].keeps_shapes else tf.TensorShape(None)
            for name in names
            for t in self._start[name]
            if t is not None
        ]

        def body(k: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            return [k + 1, *flatten(_Tick(self, pack(flat)).build())]

        count = tf.constant(self._count)
        handles = dict(self._run.lists.handles)
        before = self._run.state
        with without_automatic_order():
            results = tf.while_loop(
                lambda k, *_: k < count,
                body,
                [tf.constant(0), *flatten(self._start)],
                shape_invariants=[tf.TensorShape([]), *shapes],
                parallel_iterations=_PARALLEL_ITERATIONS,
            )
        self._run.state, self._run.lists.handles = before, handles
        self._finish(pack(results[1:]))

    def _finish(self, values: dict[Name, Grads]) -> None:
        state = self._run.state
        for name, variable in self._variables.items():
            kind, key = name[0], name[1]
            if kind == "token":
                pinned = pin_each(values[name], variable.devices)
                state.tokens[key] = [[t.op] for t in pinned if t is not None]
            elif kind == "list":
                self._run.lists.handles[key] = values[name]
            elif kind in ("forward", "backward"):
                state.notes[kind][key] = values[name]
            elif kind in ("carries", "carry_grads", "accumulators"):
                getattr(state, kind)[key] = values[name]


class _Tick:
    """The body of the loop."""

    def __init__(self, loop: _TickLoop, values: dict[Name, Grads]) -> None:
        self._loop = loop
        self._run = loop._run
        self._machine = loop._machine
        self._values = values
        self._rows: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._equal: dict[tuple[int, int, Name, int], tf.Tensor] = {}
        self._chains: dict[Name, Branching] = {}
        self._sent: dict[Channel, list[Grads]] = {}

    def build(self) -> dict[Name, Grads]:
        """The variables after a tick."""
        for home in self._loop._programs:
            self._decode(home)
        for home, own in self._loop._programs.items():
            self._act(home, own)
        for home, own in self._loop._programs.items():
            self._receive(home, own)
        return self._values

    def _decode(self, home: int) -> None:
        name: Name = ("counter", home)
        counted: Grads = []
        for place, counter in enumerate(self._values[name]):
            assert counter is not None
            with tf.device(self._loop._variables[name].devices[place]):
                row = tf.gather(self._loop._tables[home, place], counter)
                self._rows[home, place] = tf.unstack(row, num=len(self._loop._columns[home]))
                counted.append(counter + 1)
        self._values[name] = counted

    def number(self, home: int, place: int, column: Name) -> tf.Tensor:
        """What stands in a column of this tick's row."""
        return self._rows[home, place][self._loop._columns[home][column]]

    def where(self, home: int, column: Name, number: int) -> Callable[[int], tf.Tensor]:
        """For each place whether a number stands in a column."""

        def predicate(place: int) -> tf.Tensor:
            key = home, place, column, number
            if key not in self._equal:
                with tf.device(self._loop._variables["counter", home].devices[place]):
                    found = self.number(home, place, column)
                    self._equal[key] = tf.equal(found, number)
            return self._equal[key]

        return predicate

    def _chain(self, name: Name, variable: _Variable, start: Grads | None = None) -> Branching:
        if name not in self._chains:
            values = self._values[name] if start is None else start
            self._chains[name] = Branching(values, variable.devices, variable.places)
        return self._chains[name]

    def _act(self, home: int, own: HomeProgram) -> None:
        for number, code in enumerate(own.codes):
            _Act(self, home, code, self.where(home, ("code",), number)).perform()
        for name, chain in self._chains.items():
            self._values[name] = chain.merged()
        self._chains.clear()

    def _receive(self, home: int, own: HomeProgram) -> None:
        for channel, registers in own.registers.items():
            for number in range(len(registers)):
                self._register(home, channel, number)
        for channel in own.arrivals:
            key = Lists.key(channel.kind, channel.stage, FULL)
            name, lists = ("list", key), self._run.lists
            variable = self._loop._variables[name]
            idle = Branching(self._values[name], variable.devices, variable.places)
            comes = self._arrives(home, channel)
            lists.handles[key] = idle.enter(comes)
            index = self.number(home, 0, ("put", channel))
            lists.put(key, index, merged(self._sent[channel]))
            idle.leave(lists.handles[key])
            self._values[name] = idle.merged()

    def _arrives(self, home: int, channel: Channel) -> Callable[[int], tf.Tensor]:
        nothing_comes = self.where(home, ("put", channel), NOTHING)
        made: dict[int, tf.Tensor] = {}

        def predicate(place: int) -> tf.Tensor:
            if place not in made:
                with tf.device(self._loop._variables["counter", home].devices[place]):
                    made[place] = tf.logical_not(nothing_comes(place))
            return made[place]

        return predicate

    def _register(self, home: int, channel: Channel, number: int) -> None:
        name: Name = ("register", channel, number)
        variable = self._loop._variables[name]
        where = variable.devices, variable.places
        old = Branching(self._values[name], *where)
        new = merged(self._sent[channel])
        if len(self._loop._programs[home].registers[channel]) > 1:
            new = Branching(new, *where).enter(self.where(home, name, TAKES))
        cleared = Branching(self._loop._nothing(channel, variable), *where)
        kept = old.enter(self.where(home, name, KEEPS))
        gone = cleared.enter(self.where(home, name, CLEARS))
        self._values[name] = merged([kept, new, gone], variable.devices)


class _Act:
    """One kind of action within the body; what it reads and writes."""

    def __init__(self, tick: _Tick, home: int, code: Code, chosen: Callable[[int], Any]) -> None:
        self._tick = tick
        self._loop = tick._loop
        self._run = tick._run
        self._home = home
        self._code = code
        self._chosen = chosen
        self._microbatch = tf.zeros([], tf.int64)
        # Only what it needs: a kind and a stage, and the mode that its values depend on.
        self._any = Action(code.stage, code.kind, 0)
        self._state = tick._run.state

    @property
    def state(self) -> State:
        """What is held from action to action."""
        return self._state

    def perform(self) -> None:
        """Adds its operations, and leaves in the variables what it makes."""
        tick, code, home = self._tick, self._code, self._home
        scope = f"{code.mode.name}/action_{code.stage}{code.kind}"
        with self._loop._machine.acting(scope, code.stage):
            tokens = self._enter(("token", home))
            pivots = [t for t in pin_each(tokens, self._loop._home_devices[home]) if t is not None]
            self._state = state = self._entered(pivots)
            index = tick.number(home, 0, ("microbatch",))
            with tf.device(host_of(self._loop._home_devices[home][0])):
                self._microbatch = tf.cast(index, tf.int64)
            self._loop._machine.act(code.kind, code.stage, code.mode, self._microbatch, self)
            after: Grads = []
            for pivot, operations, device in zip(
                pivots, state.tokens[home], self._loop._home_devices[home], strict=True
            ):
                with tf.control_dependencies(operations), tf.device(device):
                    after.append(tf.ensure_shape(pivot, []))
        self._leave(("token", home), after)
        for name, _, _ in self._loop._held(code):
            if name in self._loop._variables:
                self._leave(name, _of_state(state, name))

    def _entered(self, pivots: Sequence[tf.Tensor]) -> State:
        base, stage = self._run.state, self._code.stage
        state = State(
            [*base.carries],
            [*base.carry_grads],
            [*base.accumulators],
            [*base.tokens],
            {"forward": [*base.notes["forward"]], "backward": [*base.notes["backward"]]},
        )
        state.tokens[self._home] = [[pivot.op] for pivot in pivots]
        for name, _, _ in self._loop._held(self._code):
            if name in self._loop._variables:
                values = self._enter(name)
                if name[0] in ("forward", "backward"):
                    state.notes[name[0]][stage] = values
                else:
                    getattr(state, name[0])[stage] = values
        return state

    def _enter(self, name: Name) -> Grads:
        chain = self._tick._chain(name, self._loop._variables[name])
        return chain.enter(self._chosen)

    def _leave(self, name: Name, values: Sequence[tf.Tensor | None]) -> None:
        self._tick._chains[name].leave(values)

    def _spot(self, channel: Channel) -> Spot:
        return Spot(channel, self._code.mode if channel.kind.by_mode else None)

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        """What was written."""
        channel = Channel(kind, stage)
        found: list[Any]
        if channel in self._run.sources:
            return self._run.sources[channel](self._microbatch)
        own = self._loop._programs[self._home]
        if channel in own.registers:
            found = self._registers(channel, len(own.registers[channel]))
        else:
            key = key_of(self._spot(channel))
            index = self._tick.number(self._home, 0, ("index", self._spot(channel)))
            lists, name = self._run.lists, ("list", key)
            lists.handles[key] = self._enter(name)
            found = lists.take(key, index)
            self._leave(name, lists.handles[key])
        return found

    def _registers(self, channel: Channel, count: int) -> Grads:
        tick, home = self._tick, self._home
        variable = self._loop._variables["register", channel, 0]
        chosen = []
        for number in range(count):
            values = tick._values["register", channel, number]
            if count > 1:
                branching = Branching(values, variable.devices, variable.places)
                values = branching.enter(tick.where(home, ("read", channel), number))
            chosen.append(values)
        specs = self._loop._machine.specs(channel.kind, channel.stage)
        found: Grads = []
        for tensors, spec, device, place in zip(
            zip(*chosen, strict=True), specs, variable.devices, variable.places, strict=True
        ):
            if spec is None:
                found.append(None)
                continue
            with tf.device(device), tf.control_dependencies(self._state.tokens[home][place]):
                tensor = tensors[0]
                if count > 1:
                    with tf.control_dependencies(None):
                        tensor = tf.raw_ops.Merge(inputs=list(tensors)).output
                found.append(tf.ensure_shape(tensor, spec.shape))
        return found

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        """Leaves something for a later action."""
        channel = Channel(kind, stage)
        own = self._loop._programs[self._home]
        memory, spot = self._run.memory, self._spot(channel)
        if spot in own.indices:
            key = key_of(spot)
            lists, name = self._run.lists, ("list", key)
            lists.handles[key] = self._enter(name)
            index = self._tick.number(self._home, 0, ("index", spot))
            lists.put(key, index, value)
            self._leave(name, lists.handles[key])
        elif crosses_(channel, self._run.homes, memory) and self._is_used(channel):
            self._tick._sent.setdefault(channel, []).append([*value])

    def _is_used(self, channel: Channel) -> bool:
        own = self._loop._programs.get(self._run.homes[user(channel)])
        return own is not None and (channel in own.registers or channel in own.arrivals)


def crosses_(channel, homes, memory):
    return not memory.leaves(channel) and crosses(channel, homes)


def merged(found: Sequence[Sequence[tf.Tensor | None]], devices: Sequence[str] = ()) -> Grads:
    """Of lists of tensors that one which is there; None where there never is one.

    Args:
        found: the lists.
        devices: where each tensor of the result is to lie; by default where that of the first does.
    """
    if len(found) == 1:
        return [*found[0]]
    chosen: Grads = []
    for number, tensors in enumerate(zip(*found, strict=True)):
        there = [t for t in tensors if t is not None]
        if not there:
            chosen.append(None)
            continue
        with tf.device(devices[number] if devices else there[0].device):
            chosen.append(tf.raw_ops.Merge(inputs=there).output)
    return chosen


def _of_state(state: State, name: Name) -> Grads:
    kind, stage = name
    if kind in ("forward", "backward"):
        return [*state.notes[kind][stage]]
    return [*(getattr(state, kind)[stage] or [])]


def key_of(spot: Spot) -> Key:
    """The key of the list."""
    (kind, stage), mode = spot
    return Lists.key(kind, stage, mode or FULL)


def host_of(device: str) -> str:
    """The processor beside a device, where small numbers are computed."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type in (None, "CPU"):
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _constant(value: Any, dtype: tf.DType, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.constant(value, dtype)
