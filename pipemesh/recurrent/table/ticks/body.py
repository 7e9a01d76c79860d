"""One tick: each kind of action of each home once, of which those are performed that are due."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor, anchor, pin_each, pin_present
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.table.kinds import Channel, Kind
from pipemesh.recurrent.table.listed import Source
from pipemesh.recurrent.table.lists import Lists
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.state import State
from pipemesh.recurrent.table.ticks.branches import Branching, Fan, Predicate, merged
from pipemesh.recurrent.table.ticks.codes import Role, key_of
from pipemesh.recurrent.table.ticks.program import CLEARS, KEEPS, HomeProgram
from pipemesh.recurrent.table.ticks.shelves import Shelves
from pipemesh.recurrent.table.ticks.variables import Name, Variables, Wire


@dataclasses.dataclass(frozen=True)
class Body:
    """The body of a loop over ticks.

    Attributes:
        machine: performs actions.
        programs: what each home does.
        variables: what goes from tick to tick.
        lists: values that lie in lists.
        sources: for channels that no action makes a function of the microbatch.
        state: before the loop.
    """

    machine: Machine
    programs: Mapping[int, HomeProgram]
    variables: Variables
    lists: Lists
    sources: Mapping[Channel, Source]
    state: State

    def tick(self, values: dict[Name, Grads]) -> dict[Name, Grads]:
        """The values of the variables after a tick."""
        told: dict[Channel, list[Grads]] = {}
        after = dict[Name, Grads]()
        homes = {home: _Home(self, home, values, told) for home in self.programs}
        for home in homes.values():
            after.update(home.act())
        # What is sent may be sent by any of them.
        for home in homes.values():
            after.update(home.receive(after))
        return after


class _Home:
    """What one home does at a tick.

    Args:
        body: the whole.
        home: its number.
        values: of the variables before the tick.
        told: what homes send to others; what it sends is added.
    """

    def __init__(
        self,
        body: Body,
        home: int,
        values: Mapping[Name, Grads],
        told: dict[Channel, list[Grads]],
    ) -> None:
        self.body = body
        self.number = home
        self.values = values
        self.told = told
        self.program = body.programs[home]
        self.devices = body.variables.devices[home]
        ticks = values[Name("tick", home)]
        self.flag = body.variables.flags[home].row(ticks)
        self.numbers = body.variables.numbers[home].row(ticks)
        with tf.device(body.variables.named[Name("tick", home)].devices[0]):
            self.microbatch = tf.cast(self.numbers(0, "microbatch"), tf.int64)
        count = len(self.program.roles)
        token = values[Name("token", home)]
        self.tokens = Fan(token, self.devices, range(len(token)), self._code, count)
        handles = {shelf: values[Name("shelf", shelf)] for shelf in self.program.slots}
        self.shelves = Shelves(handles, self.devices, self.numbers, count)
        self._branchings: dict[Name, Branching] = {}
        self._arrived: dict[Wire, Grads] = {}
        self._taken: dict[Wire, Fan] = {}
        self._nothing: dict[Wire, Grads] = {}

    def _code(self, place: int) -> tf.Tensor:
        """The number of the kind of action that is due, at a place."""
        return self.numbers(place, "code")

    def when(self, *column: Any) -> Predicate:
        """For each place whether a flag is set."""
        return lambda place: self.flag(place, column)

    def branching(self, name: Name) -> Branching:
        """A variable on its way through the actions."""
        if name not in self._branchings:
            self._branchings[name] = self._branching(name, self.values[name])
        return self._branchings[name]

    def _branching(self, name: Name, values: Grads) -> Branching:
        variable = self.body.variables.named[name]
        return Branching(values, variable.devices, variable.places)

    def act(self) -> dict[Name, Grads]:
        """The home's variables after whichever of its actions is performed."""
        name = Name("tick", self.number)
        counted: Grads = []
        for tick, host in zip(
            self.values[name], self.body.variables.named[name].devices, strict=True
        ):
            assert tick is not None
            with tf.device(host):
                counted.append(tick + 1)
        for number, role in enumerate(self.program.roles):
            _Act(self, role, number).perform()
        after = {name: branching.merged() for name, branching in self._branchings.items()}
        shelves = self.shelves.merged()
        return {
            name: counted,
            Name("token", self.number): self.tokens.merged(),
            **{Name("shelf", shelf): handle for shelf, handle in shelves.items()},
            **after,
        }

    def receive(self, after: Mapping[Name, Grads]) -> dict[Name, Grads]:
        """Its registers, and the lists in which something arrives, at the end of the tick."""
        found: dict[Name, Grads] = {}
        for channel, registers in self.program.registers.items():
            for number, column in enumerate(registers):
                found[Name("register", channel, number)] = self._register(channel, number, column)
        for channel in self.program.arrivals:
            key, lists = key_of(channel), self.body.lists
            name = Name("list", key)
            branching = self._branching(name, after[name])
            lists.handles[key] = branching.enter(self.when("arrives", channel))
            sent = self._sent(channel, self.body.variables.named[name].devices)
            lists.put(key, self.numbers(0, ("arrives", channel)), sent)
            branching.leave(lists.handles[key])
            found[name] = branching.merged()
        return found

    def _sent(self, channel: Channel, devices: Sequence[str]) -> Grads:
        """What arrives here at this tick by the wire of a channel, if anything does."""
        wire = self.body.variables.wires[channel]
        if wire not in self._arrived:
            told = [values for each in wire for values in self.told[each]]
            sent = merged(told, self.body.variables.sending_devices(channel))
            # TensorFlow puts a switch where its data are made. So each register would have a copy
            # sent, and send its number there first.
            self._arrived[wire] = _received(sent, devices)
        return self._arrived[wire]

    def _register(self, channel: Channel, number: int, column: Sequence[int]) -> Grads:
        name = Name("register", channel, number)
        devices = self.body.variables.named[name].devices
        wire, sent = self.body.variables.wires[channel], self._sent(channel, devices)
        takers = self.body.variables.takers(self.program, channel)
        if len(takers) > 1 or len(wire) > 1:
            if wire not in self._taken:
                places = self.body.variables.named[name].places
                self._taken[wire] = Fan(
                    sent, devices, places, lambda p: self.numbers(p, ("takes", wire)), len(takers)
                )
            sent = self._taken[wire].to(takers.index((channel, number)))
        if wire not in self._nothing:
            self._nothing[wire] = self.body.variables.nothing(channel, devices)
        empty = self._branching(name, self._nothing[wire])
        found = [sent, empty.enter(self.when(channel, number, CLEARS))]
        if KEEPS in column:
            kept = self._branching(name, self.values[name])
            found.append(kept.enter(self.when(channel, number, KEEPS)))
        return merged(found, devices)


class _Act:
    """One kind of action of a home: what it reads and writes.

    Args:
        home: that performs it.
        role: its kind.
        number: of its kind.
    """

    def __init__(self, home: _Home, role: Role, number: int) -> None:
        self._home = home
        self._role = role
        self._number = number
        self._accesses = home.program.accesses[number]
        self._is_due = home.when("code", number)
        self._microbatch = home.microbatch
        self._state = home.body.state

    @property
    def state(self) -> State:
        """What is held from action to action."""
        return self._state

    def perform(self) -> None:
        """Adds its operations; the variables on their way take what it makes."""
        home, code, machine = self._home, self._role.code, self._home.body.machine
        with machine.acting(f"{code.mode.name}/action_{code.stage}{code.kind}", code.stage):
            begins = pin_each(home.tokens.to(self._number), home.devices)
            held = [name for name, _, _ in home.body.variables.held(code)]
            self._state = state = _with(
                home.body.state,
                {name: home.branching(name).enter(self._is_due) for name in held},
                (home.number, [[begin.op] for begin in begins if begin is not None]),
            )
            machine.act(code.kind, code.stage, code.mode, self._microbatch, self)
            ends: Grads = []
            for begin, done, device in zip(
                begins, state.tokens[home.number], home.devices, strict=True
            ):
                with tf.control_dependencies(done), tf.device(device):
                    ends += pin_present([begin])
        home.tokens.leave(self._number, ends)
        for name in held:
            home.branching(name).leave(_of(state, name))

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        """What was written."""
        channel, body = Channel(kind, stage), self._home.body
        found: list[Any]
        if channel in body.sources:
            found = body.sources[channel](self._microbatch)
        elif channel in self._home.program.registers:
            found = self._arrived(channel)
        else:
            key = key_of(channel, self._role.code.mode)
            if key in self._accesses:
                specs = body.machine.specs(*key)
                return self._home.shelves.take(self._number, self._accesses[key], specs)
            found = self._listed(key, lambda index: body.lists.take(key, index))
        return found

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        """Leaves something for a later action."""
        channel = Channel(kind, stage)
        key = key_of(channel, self._role.code.mode)
        if channel in self._role.tells:
            self._home.told.setdefault(channel, []).append([*value])
        elif key in self._accesses:
            self._home.shelves.put(self._number, self._accesses[key], value)
        elif key in self._role.puts:
            self._listed(key, lambda index: self._home.body.lists.put(key, index, value))

    def _listed(self, key: Any, use: Callable[[tf.Tensor], Any]) -> Any:
        """Uses a list, at the place that it has for the microbatch."""
        handles, branching = self._home.body.lists.handles, self._home.branching(Name("list", key))
        handles[key] = branching.enter(self._is_due)
        found = use(self._home.numbers(0, ("index", key)))
        branching.leave(handles[key])
        return found

    def _arrived(self, channel: Channel) -> Grads:
        """What lies in the register that is read at this tick, in the shape that it must have."""
        home, name = self._home, Name("register", channel)
        variable = home.body.variables.named[name]
        chosen = [home.values[name]]
        if (count := len(home.program.registers[channel])) > 1:
            chosen = [
                Branching(
                    home.values[name._replace(number=i)], variable.devices, variable.places
                ).enter(home.when("read", channel, i))
                for i in range(count)
            ]
        found: Grads = []
        specs = home.body.machine.specs(channel.kind, channel.stage)
        for tensor, spec, device, place in zip(
            merged(chosen, variable.devices), specs, variable.devices, variable.places, strict=True
        ):
            if tensor is None or spec is None:
                found.append(None)
                continue
            # A register that is not read may hold nothing, which has another shape.
            begins = self._state.tokens[home.number][place]
            with tf.device(device), tf.control_dependencies(begins):
                found.append(tf.ensure_shape(tensor, spec.shape))
        return found


def _received(sent: Grads, devices: Sequence[str]) -> Grads:
    """The tensors on their devices, by operations that TensorFlow leaves there."""
    received: Grads = []
    for tensor, device in zip(sent, devices, strict=True):
        with tf.device(device):
            received.append(None if tensor is None else anchor(tensor))
    return received


def _with(
    state: State, values: Mapping[Name, Grads], tokens: tuple[int, list[list[tf.Operation]]]
) -> State:
    """A copy of the state in which some of it is other."""
    copy = State(
        [*state.carries],
        [*state.carry_grads],
        [*state.accumulators],
        [*state.tokens],
        {direction: [*notes] for direction, notes in state.notes.items()},
    )
    for name, tensors in values.items():
        put(copy, name, tensors)
    home, operations = tokens
    copy.tokens[home] = operations
    return copy


def put(state: State, name: Name, tensors: Grads) -> None:
    """Puts the values of a variable where they belong."""
    where: Any = state.notes if name.what in state.notes else vars(state)
    where[name.what][name.key] = tensors


def _of(state: State, name: Name) -> Grads:
    where: Any = state.notes if name.what in state.notes else vars(state)
    return [*where[name.what][name.key]]
