"""Performs a schedule as one loop over its ticks.

The body of the loop has each kind of action of each home once. Tables of numbers, with a row per
tick, say which action is due, for which microbatch, and where its values are. So the graph grows
only with the number of stages. TensorFlow overlaps the iterations of a loop, each device as far as
its inputs allow, so a tick is no barrier.

An action that is not due is dead, in TensorFlow's sense: one side of a `Switch` has no value, and
nothing that depends on it is computed. A value for another home is sent when its action has made
it. It stays in a buffer of the receiving home until it is read; other actions do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import without_automatic_order
from pipemesh.backend.operations import (
    MaybeTensor,
    anchor,
    list_get,
    list_set,
    on_each,
    pin_each,
    pin_present,
)
from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.pieces import parts
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.stage import Grads, Tensors
from pipemesh.recurrent.table.loop_program import (
    CLEARS,
    KEEPS,
    Access,
    HomeBuffer,
    HomeProgram,
    Role,
    Roles,
    Slots,
    program,
)
from pipemesh.recurrent.table.loop_variables import (
    Branching,
    Buffers,
    ChannelGroup,
    Fan,
    Name,
    Predicate,
    Variables,
    merged,
    nothing,
)
from pipemesh.recurrent.table.machine import Channel, Key, Machine, State, key_of
from pipemesh.schedule import Action
from pipemesh.schedule.action import GRADS, OUTPUTS

# Returns the values of a channel for a microbatch, or piece (int64 scalar).
Source = Callable[[tf.Tensor], Grads]
# Returns the number at a tick, for a device of a home (by index) and the name of a column.
Numbers = Callable[[int, Any], tf.Tensor]


class _Home:
    """One home at a tick; values that it sends to other homes are added to `sent`."""

    def __init__(
        self,
        loop: Loop,
        variables: Variables,
        home: int,
        program: HomeProgram,
        values: Mapping[Name, Grads],
        sent: dict[Channel, list[Grads]],
    ) -> None:
        self.loop = loop
        self.variables = variables
        self.number = home
        self.values = values
        self.sent = sent
        self.program = program
        self.devices = variables.devices[home]
        ticks = values[Name("tick", home)]
        self.flag = variables.flags[home].row(ticks)
        self.numbers = variables.numbers[home].row(ticks)
        with tf.device(variables.named[Name("tick", home)].devices[0]):
            self.microbatch = tf.cast(self.numbers(0, "microbatch"), tf.int64)
        count = len(self.program.roles)
        token = values[Name("token", home)]
        self.tokens = Fan(token, self.devices, range(len(token)), self._code, count)
        handles = {buffer: values[Name("home", buffer)] for buffer in self.program.buffers}
        self.buffers = HomeBuffers(handles, self.devices, self.numbers, count)
        self._branchings: dict[Name, Branching] = {}

    def _code(self, place: int) -> tf.Tensor:
        """Returns the number of the role that is due, on a device of the home."""
        return self.numbers(place, "code")

    def when(self, *column: Any) -> Predicate:
        """Returns a function that returns a flag on each device of the home."""
        return lambda place: self.flag(place, column)

    def branching(self, name: Name) -> Branching:
        """Returns a variable in transit through the actions."""
        if name not in self._branchings:
            self._branchings[name] = self.new_branching(name, self.values[name])
        return self._branchings[name]

    def new_branching(self, name: Name, values: Grads) -> Branching:
        """Returns values in transit through actions, on the devices of a variable."""
        variable = self.variables.named[name]
        return Branching(values, variable.devices, variable.places)

    def act(self) -> dict[Name, Grads]:
        """Returns the home's variables after the action that is due."""
        name = Name("tick", self.number)
        hosts = self.variables.named[name].devices
        counted: Grads = on_each(hosts, lambda tick: tick + 1, self.values[name])
        for number, role in enumerate(self.program.roles):
            _Act(self, role, number).perform()
        after = {name: branching.merged() for name, branching in self._branchings.items()}
        buffers = self.buffers.merged()
        return {
            name: counted,
            Name("token", self.number): self.tokens.merged(),
            **{Name("home", buffer): handle for buffer, handle in buffers.items()},
            **after,
        }

    def receive(self, after: Mapping[Name, Grads]) -> dict[Name, Grads]:
        """Returns the buffers of arriving values, at the end of the tick."""
        program, groups = self.program, self.variables.groups
        channels = [*program.arrival_buffers, *program.indexed_arrivals]
        received: dict[Name, Grads] = {}
        for group in dict.fromkeys(groups[channel] for channel in channels):
            received |= self._receive_one_of(group, after)
        return received

    def _receive_one_of(
        self, group: ChannelGroup, after: Mapping[Name, Grads]
    ) -> dict[Name, Grads]:
        """Returns the buffers of channels of which at most one has a value at this tick."""
        variables, buffers, program = self.variables, self.loop.buffers, self.program
        first, *_ = group
        places = self.loop.machine.arrival_places(*first)
        devices = [self.devices[place] for place in places]
        # TensorFlow puts a `Switch` on the device that makes its data. So it would send a copy for
        # each buffer, after the number of that buffer was sent there. Nor may it move the operation
        # that receives them.
        values = [value for channel in group for value in self.sent[channel]]
        arriving = merged(values, variables.sending_devices(first))
        sent: Grads = on_each(devices, lambda t: None if t is None else anchor(t), arriving)
        takers = variables.takers(program, group)
        taken, count = [sent] * len(takers), len(takers)
        if takers and (count > 1 or len(group) > 1):
            column = "takes", group
            fan = Fan(sent, devices, places, lambda place: self.numbers(place, column), count)
            taken = [fan.to(user) for user in range(count)]
        empty = variables.nothing(first, devices) if takers else []
        received: dict[Name, Grads] = {}
        for (channel, number), value in zip(takers, taken, strict=True):
            name = Name("arrival", channel, number)
            cleared = self.new_branching(name, empty).enter(self.when(channel, number, CLEARS))
            choices = [value, cleared]
            if KEEPS in program.arrival_buffers[channel][number]:
                kept = self.new_branching(name, self.values[name])
                choices.append(kept.enter(self.when(channel, number, KEEPS)))
            received[name] = merged(choices, devices)
        for channel in [c for c in group if c in program.indexed_arrivals]:
            key = key_of(channel)
            name = Name("indexed", key)
            branching = self.new_branching(name, after[name])
            buffers.handles[key] = branching.enter(self.when("arrives", channel))
            buffers.put(key, self.numbers(0, ("arrives", channel)), sent)
            branching.leave(buffers.handles[key])
            received[name] = branching.merged()
        return received


class _Act:
    """One role of a home: reads and writes the values of its action."""

    def __init__(self, home: _Home, role: Role, number: int) -> None:
        self._home = home
        self._role = role
        self._number = number
        self._accesses = home.program.accesses[number]
        self._is_due = home.when("code", number)
        # The action changes it.
        self.state = State(*map(list, vars(home.loop.state).values()))

    def perform(self) -> None:
        """Adds the operations of the action and stores its results in the variables in transit."""
        home, role, state = self._home, self._role, self.state
        machine = home.loop.machine
        with machine.acting(f"{role.mode.name}/action_{role.stage}{role.kind}", role.stage):
            begins = pin_each(home.tokens.to(self._number), home.devices)
            held = [name for name, _, _ in home.variables.held(role)]
            for name in held:
                vars(state)[name.what][name.key] = home.branching(name).enter(self._is_due)
            state.tokens[home.number] = [[begin.op] for begin in begins if begin is not None]
            machine.act(role.kind, role.stage, role.mode, home.microbatch, self)
            ends: Grads = []
            for begin, done, device in zip(
                begins, state.tokens[home.number], home.devices, strict=True
            ):
                with tf.control_dependencies(done), tf.device(device):
                    ends += pin_present([begin])
        home.tokens.leave(self._number, ends)
        for name in held:
            home.branching(name).leave(vars(state)[name.what][name.key])

    def read(self, kind: str, stage: int) -> list[Any]:
        """Returns a value of the microbatch."""
        channel, loop = Channel(kind, stage), self._home.loop
        if channel in loop.sources:
            return loop.sources[channel](self._home.microbatch)
        if channel in self._home.program.arrival_buffers:
            return self._arrived(channel)
        key = key_of(channel, self._role.mode)
        if key in self._accesses:
            specs = loop.machine.specs(*key)
            return self._home.buffers.take(self._number, self._accesses[key], specs)
        return self._indexed(key, lambda index: loop.buffers.take(key, index))

    def write(self, kind: str, stage: int, value: Sequence[tf.Tensor | None]) -> None:
        """Stores a value for a later action."""
        channel = Channel(kind, stage)
        key = key_of(channel, self._role.mode)
        if channel in self._role.sends:
            self._home.sent.setdefault(channel, []).append([*value])
        elif key in self._accesses:
            self._home.buffers.put(self._number, self._accesses[key], value)
        elif key in self._role.leaves:
            self._indexed(key, lambda index: self._home.loop.buffers.put(key, index, value))

    def _indexed(self, key: Any, use: Callable[[tf.Tensor], Any]) -> Any:
        """Uses an indexed buffer, at the index of the tick."""
        handles = self._home.loop.buffers.handles
        branching = self._home.branching(Name("indexed", key))
        handles[key] = branching.enter(self._is_due)
        result = use(self._home.numbers(0, ("index", key)))
        branching.leave(handles[key])
        return result

    def _arrived(self, channel: Channel) -> Grads:
        """Returns the value of the arrival buffer that is read at this tick, with its shape."""
        home, name = self._home, Name("arrival", channel)
        variable = home.variables.named[name]
        choices = [home.values[name]]
        if (count := len(home.program.arrival_buffers[channel])) > 1:
            choices = [
                home.new_branching(name, home.values[name._replace(number=i)]).enter(
                    home.when("read", channel, i)
                )
                for i in range(count)
            ]
        value: Grads = []
        specs = home.loop.machine.specs(channel.kind, channel.stage)
        for tensor, spec, device, place in zip(
            merged(choices, variable.devices), specs, variable.devices, variable.places, strict=True
        ):
            if tensor is None or spec is None:
                value.append(None)
                continue
            # A buffer that is not read may hold nothing, which has another shape.
            begins = self.state.tokens[home.number][place]
            with tf.device(device), tf.control_dependencies(begins):
                value.append(tf.ensure_shape(tensor, spec.shape))
        return value


class HomeBuffers:
    """The home buffers of a home, in transit through its actions."""

    def __init__(
        self,
        handles: Mapping[HomeBuffer, Grads],  # before the tick
        devices: Sequence[str],
        numbers: Numbers,  # of the tick
        num_roles: int,
    ) -> None:
        self._devices = devices
        self._numbers = numbers
        self._fans = {
            buffer: Fan(
                handle,
                [devices[buffer.place]],
                [buffer.place],
                lambda place: numbers(place, "code"),
                num_roles,
            )
            for buffer, handle in handles.items()
        }
        self._constants: dict[Any, tf.Tensor] = {}

    def take(
        self,
        role: int,
        accesses: Sequence[Access | None],
        specs: Sequence[tf.TensorSpec | None],
    ) -> list[Any]:
        """Takes the tensors of a value, so that the buffers no longer hold them."""
        values: list[tf.Tensor | None] = [None] * len(accesses)
        for buffer, numbered in _by_buffer(accesses).items():
            handle: Any = self._fans[buffer].to(role)[0]
            with tf.device(self._devices[buffer.place]):
                for i, access in numbered:
                    spec = specs[i]
                    assert spec is not None
                    sizes = static_sizes(spec)
                    shape = self._once(
                        buffer, tuple(sizes), lambda sizes=sizes: tf.constant(sizes, tf.int32)
                    )
                    value = list_get(handle, self._slot(access), shape, spec.dtype)
                    value.set_shape(spec.shape)
                    values[i] = value
                gets = [t.op for i, _ in numbered if (t := values[i]) is not None]
                empty = self._once(buffer, "nothing", lambda b=buffer: nothing(b.dtype))
                # Else a list with unread values would be copied.
                with tf.control_dependencies(gets):
                    for _, access in numbered:
                        handle = list_set(handle, self._slot(access), empty)
            self._fans[buffer].leave(role, [handle])
        return values

    def put(
        self, role: int, accesses: Sequence[Access | None], values: Sequence[MaybeTensor]
    ) -> None:
        """Puts the tensors of a value into the buffers."""
        for buffer, numbered in _by_buffer(accesses).items():
            handle: Any = self._fans[buffer].to(role)[0]
            with tf.device(self._devices[buffer.place]):
                for i, access in numbered:
                    if (value := values[i]) is not None:
                        handle = list_set(handle, self._slot(access), value)
            self._fans[buffer].leave(role, [handle])

    def merged(self) -> dict[HomeBuffer, Grads]:
        """Returns the lists after the tick."""
        return {buffer: fan.merged() for buffer, fan in self._fans.items()}

    def _slot(self, access: Access) -> tf.Tensor:
        return self._numbers(access.buffer.place, access)

    def _once(self, buffer: HomeBuffer, name: Any, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a constant that all actions share, to save an operation per action and tick."""
        if (buffer, name) not in self._constants:
            self._constants[buffer, name] = make()
        return self._constants[buffer, name]


def _by_buffer(accesses: Sequence[Access | None]) -> dict[HomeBuffer, list[tuple[int, Access]]]:
    by_buffer: dict[HomeBuffer, list[tuple[int, Access]]] = {}
    for i, access in enumerate(accesses):
        if access is not None:
            by_buffer.setdefault(access.buffer, []).append((i, access))
    return by_buffer


# An idle device runs ahead until it needs a value: about as many ticks as there are homes.
_PARALLEL_ITERATIONS = 32


class Loop:
    """A performer that runs actions as one loop."""

    def __init__(
        self,
        machine: Machine,
        state: State,
        modes: Mapping[tuple[int, int], Mode],
        order: Sequence[Action],
    ) -> None:
        self.state = state
        self.machine = machine
        self._stages = machine.stages
        self._cutting = cutting = machine.cutting
        # Functions of the microbatch for channels that no action writes.
        self.sources: dict[Channel, Source] = {
            Channel(OUTPUTS, -1): lambda m: parts(machine.inputs, m, cutting)
        }
        self._roles = Roles(order, machine.stage_devices, modes)
        self._slots = Slots(order, self._roles, cutting.num_pieces, self._buffers_of)
        self.buffers = Buffers(machine, self._slots.sizes)
        self._after_forward: dict[Key, Grads] | None = None

    def _buffers_of(self, key: Key) -> list[HomeBuffer | None]:
        home, machine = self.machine.stage_devices[key.stage], self.machine
        return [
            None if spec is None else HomeBuffer(home, place, spec.dtype)
            for spec, place in zip(machine.specs(*key), machine.places(*key), strict=True)
        ]

    def seed(self, output_grads: Grads) -> None:
        """Splits the gradients of the outputs of the whole batch."""
        self._begin_backward(lambda m: parts(output_grads, m, self._cutting))

    def seed_all(self, grads: Grads) -> None:
        """Gives the outputs of every part of the batch the same gradients."""
        self._begin_backward(lambda m: grads * self._cutting.replicas)

    def _begin_backward(self, source: Source) -> None:
        self.sources[Channel(GRADS, len(self._stages))] = source
        # A second backward pass takes the same values again.
        if self._after_forward is None:
            self._after_forward = dict(self.buffers.handles)
        self.buffers.handles = dict(self._after_forward)

    def perform(self, actions: Sequence[Action]) -> None:
        """Performs actions as one loop."""
        if not actions:
            return
        self.state.forget_tokens_of_other_graphs()
        # Outside the loop, whose ticks take them as they are.
        self.machine.fetch()
        for stage in sorted({action.stage for action in actions if action.kind not in "FR"}):
            self.machine.begin(stage, self.state)
        homes, buffers = self.machine.stage_devices, self.buffers
        programs, num_ticks = program(actions, homes, self._roles, self._slots)
        variables = Variables(programs, self.machine, self.state, buffers)

        def tick(k: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            values, sent = variables.pack(flat), dict[Channel, list[Grads]]()
            ticking = [
                _Home(self, variables, home, program, values, sent)
                for home, program in programs.items()
            ]
            after = {name: value for home in ticking for name, value in home.act().items()}
            # Any home may send to any other.
            for home in ticking:
                after.update(home.receive(after))
            return [k + 1, *variables.flatten(after)]

        count = tf.constant(num_ticks)
        start = {name: variable.start for name, variable in variables.named.items()}
        handles = dict(buffers.handles)
        with self.machine.guarding(), without_automatic_order():
            results = tf.while_loop(
                lambda k, *_: k < count,
                tick,
                [tf.constant(0), *variables.flatten(start)],
                shape_invariants=[tf.TensorShape([]), *variables.shapes()],
                parallel_iterations=max(_PARALLEL_ITERATIONS, 2 * len(programs)),
            )
        buffers.handles = handles
        self._finish(variables, variables.pack(results[1:]))

    def _finish(self, variables: Variables, values: Mapping[Name, Grads]) -> None:
        """Passes the loop's results to later operations."""
        for name, variable in variables.named.items():
            if name.what == "token":
                # Separate operations: a dependency on the loop would wait for all of it.
                pinned = pin_each(values[name], variable.devices)
                self.state.tokens[name.key] = [[t.op] for t in pinned if t is not None]
            elif name.what in ("indexed", "home"):
                self.buffers.handles[name.key] = values[name]
            elif name.what not in ("tick", "arrival"):
                vars(self.state)[name.what][name.key] = values[name]

    def outputs(self) -> Tensors:
        """Returns the last stage's outputs for the whole batch."""
        key = key_of(Channel(OUTPUTS, len(self._stages) - 1))
        return [t for t in self.buffers.joined(key, self._cutting) if t is not None]

    def input_grads(self) -> Grads:
        """Returns the gradients of the pipeline's inputs."""
        return self.buffers.joined(key_of(Channel(GRADS, 0)), self._cutting)
