"""Variables of the loop, which go from tick to tick, and switches that pass them to actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.devices import processor_beside
from pipemesh.backend.operations import (
    list_get,
    list_set,
    merge,
    on_each,
    pin_each,
    switch,
    switch_to,
    table,
)
from pipemesh.backend.static_shape import static_sizes
from pipemesh.recurrent.passes.pieces import Cutting, join_stacked
from pipemesh.recurrent.stage import Grads
from pipemesh.recurrent.table.loop_program import (
    CLEARS,
    KEEPS,
    NOTHING,
    TAKES,
    HomeProgram,
    Role,
)
from pipemesh.recurrent.table.machine import Channel, Key, Machine, State, key_of


class Buffers:
    """The buffers of a run: TensorFlow lists for values of one tensor, or of one dtype.

    A put makes a new list, which shares all other elements with the old one.
    """

    def __init__(self, machine: Machine, sizes: Mapping[Any, int]) -> None:
        # Lists of channels, with None for a missing tensor, and lists with other names.
        self.handles: dict[Any, Grads] = {}
        self._devices: dict[Any, Sequence[str]] = {}
        self._machine = machine
        self._sizes = sizes

    def reserve(
        self, name: Hashable, dtypes: Sequence[tf.DType | None], devices: Sequence[str]
    ) -> None:
        """Makes lists for values of any shape unless they exist."""
        self._devices[name] = devices
        if name in self.handles:
            return
        self.handles[name] = handles = list[Any]()
        for dtype, device in zip(dtypes, devices, strict=True):
            if dtype is None:
                handles.append(None)
                continue
            with tf.device(device):
                # Of any shape, because cleared elements have another one.
                handles.append(
                    tf.raw_ops.TensorListReserve(
                        element_shape=tf.constant(-1),
                        num_elements=tf.constant(self._sizes[name]),
                        element_dtype=dtype,
                    )
                )

    def put(self, key: Key, index: tf.Tensor, values: Sequence[tf.Tensor | None]) -> None:
        """Puts the tensors of a value at an index, an int32 scalar."""
        handles = [*self.handles[key]]
        for i, (handle, value, device) in enumerate(
            zip(handles, values, self._devices[key], strict=True)
        ):
            if handle is not None and value is not None:
                with tf.device(device):
                    handles[i] = list_set(handle, index, value)
        self.handles[key] = handles

    def take(self, key: Key, index: tf.Tensor) -> Grads:
        """Takes the tensors of a value, so that the buffer no longer holds them."""
        known = zip(self.handles[key], self._machine.specs(*key), self._devices[key], strict=True)
        values: Grads = []
        cleared: Grads = []
        for handle, spec, device in known:
            if handle is None or spec is None:
                values.append(None)
                cleared.append(None)
                continue
            with tf.device(device):
                shape = tf.constant(static_sizes(spec), tf.int32)
                value = list_get(handle, index, shape, spec.dtype)
                value.set_shape(spec.shape)
                values.append(value)
                cleared.append(nothing(spec.dtype))
        self.put(key, index, cleared)
        return values

    def joined(self, key: Key, cutting: Cutting) -> Grads:
        """Returns the values of all pieces and replicas, joined to the whole batch."""
        stage = self._machine.stages[key.stage]
        specs, handles = self._machine.specs(*key), self.handles[key]
        devices, count = self._devices[key], len(specs) // stage.of_home.num_replicas
        joined: Grads = []
        for i, spec in enumerate(specs[:count]):
            stacked: list[tf.Tensor] = []
            for handle, device in zip(handles[i::count], devices[i::count], strict=True):
                if handle is None or spec is None:
                    continue
                with tf.device(device):
                    stacked.append(
                        tf.raw_ops.TensorListStack(
                            input_handle=handle,
                            element_shape=tf.constant(static_sizes(spec), tf.int32),
                            element_dtype=spec.dtype,
                            num_elements=cutting.num_pieces,
                        )
                    )
            with tf.device(devices[i]):
                joined.append(join_stacked(stacked, cutting) if stacked else None)
        return joined


def nothing(dtype: tf.DType) -> tf.Tensor:
    """Returns the smallest value of a dtype; a variant is a list, as loops in stages make."""
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=0, element_dtype=tf.float32
        )
    return tf.zeros([0], dtype)


# Channels from one home to another that are sent as one, because each tick has at most one of them.
ChannelGroup = tuple[Channel, ...]
# Returns the boolean, or the number, on a device of a home, by its index.
Predicate = Callable[[int], tf.Tensor]
Number = Callable[[int], tf.Tensor]


class Name(NamedTuple):
    """The name of a variable."""

    what: str  # `tick`, `token`, `arrival`, `indexed`, `home`, or an attribute of `State`
    key: Any  # the home, channel, buffer or stage
    number: int = 0  # of the arrival buffer


@dataclasses.dataclass(frozen=True)
class Variable:
    """Tensors that go from tick to tick."""

    start: Grads  # before the first tick
    devices: list[str]
    places: list[int]  # indices of these devices in their home
    keeps_shapes: bool = True  # True if shapes are always those of the start


class Variables:
    """All variables of a loop."""

    def __init__(
        self,
        programs: Mapping[int, HomeProgram],
        machine: Machine,
        state: State,
        buffers: Buffers,  # missing ones are added
    ) -> None:
        self._machine = machine
        self._stages, homes = machine.stages, machine.stage_devices
        self._state = state
        self._buffers = buffers
        self.devices = {
            home: list(stage.devices) for home, stage in zip(homes, self._stages, strict=True)
        }
        self.named: dict[Name, Variable] = {}
        self.flags: dict[int, Table] = {}  # By home, a row per tick, on each of its devices.
        self.numbers: dict[int, Table] = {}
        # For each arriving channel, all channels that are sent with it.
        self.groups: dict[Channel, ChannelGroup] = {}
        for home, program in programs.items():
            self._add_groups([*program.arrival_buffers, *program.indexed_arrivals])
            self._add_home(home, program)

    def _add_groups(self, channels: Sequence[Channel]) -> None:
        """Groups a home's arrivals that come from one home and have the same specs.

        A home performs one action per tick, and an action sends at most one value. Sending a
        missing value and waiting for it takes as long as all operations of a small action.
        """
        alike: dict[Any, list[Channel]] = {}
        for channel in channels:
            specs = [
                None if spec is None else (str(spec.shape), spec.dtype)
                for spec in self._machine.specs(*channel)
            ]
            places = self._machine.places(*channel), self._machine.arrival_places(*channel)
            home = self._machine.stage_devices[channel.stage]
            alike.setdefault(repr((home, specs, places)), []).append(channel)
        self.groups |= {c: tuple(group) for group in alike.values() for c in group}

    def sending_devices(self, channel: Channel) -> list[str]:
        """Returns the devices that make the tensors of a channel."""
        devices = self._stages[channel.stage].devices
        return [devices[place] for place in self._machine.places(*channel)]

    def _add_home(self, home: int, program: HomeProgram) -> None:
        hosts = [processor_beside(device) for device in self.devices[home]]
        places = [*range(len(hosts))]
        zeros: Grads = on_each(hosts, lambda: tf.constant(0))
        self.named[Name("tick", home)] = Variable(zeros, hosts, places)
        tokens: Grads = []
        for device, ends in zip(self.devices[home], self._state.tokens[home], strict=True):
            with tf.control_dependencies(ends), tf.device(device):
                tokens.append(tf.ensure_shape(tf.zeros([]), []))
        self.named[Name("token", home)] = Variable(tokens, self.devices[home], places)
        for role in program.roles:
            for name, tensors, places in self.held(role):
                self._add(home, name, tensors, places)
        flags: dict[Any, Any] = {
            ("code", i): program.code == i
            for i, role in enumerate(program.roles)
            if self._has_branch(role, program)
        }
        idle = len(program.roles)
        numbers: dict[Any, Any] = {
            "code": np.where(program.code == NOTHING, idle, program.code),
            "microbatch": program.microbatch,
        }
        for channel, columns in program.arrival_buffers.items():
            places = self._machine.arrival_places(*channel)
            devices = [self.devices[home][place] for place in places]
            for number, column in enumerate(columns):
                start = self.nothing(channel, devices)
                name = Name("arrival", channel, number)
                self.named[name] = Variable(start, devices, places, keeps_shapes=False)
                for becomes in (KEEPS, CLEARS):
                    flags[channel, number, becomes] = column == becomes
                flags["read", channel, number] = program.arrival_reads[channel] == number
            takers = self.takers(program, self.groups[channel])
            chosen = np.full(len(program.code), len(takers))
            for i, (taker, number) in enumerate(takers):
                chosen[program.arrival_buffers[taker][number] == TAKES] = i
            numbers["takes", self.groups[channel]] = chosen
        for channel, column in program.indexed_arrivals.items():
            flags["arrives", channel] = column != NOTHING
            numbers["arrives", channel] = np.maximum(column, 0)
            # The loop of an earlier phase has emptied it.
            self._buffers.handles.pop(key_of(channel), None)
        for key, column in program.indices.items():
            numbers["index", key] = column
            channel = Channel(key.kind, key.stage)
            places = self._machine.places(*key)
            if channel in program.indexed_arrivals:
                places = self._machine.arrival_places(*channel)
            dtypes = [None if spec is None else spec.dtype for spec in self._machine.specs(*key)]
            self._reserve(home, Name("indexed", key), dtypes, places)
        numbers |= program.slots
        for buffer in program.buffers:
            self._reserve(home, Name("home", buffer), [buffer.dtype], [buffer.place])
        self.flags[home] = Table(flags, hosts, np.bool_)
        self.numbers[home] = Table(numbers, hosts, np.int32)

    def _has_branch(self, role: Role, program: HomeProgram) -> bool:
        """Returns True if a role changes variables that not all roles change."""
        arrived = any(channel in program.indexed_arrivals for channel in role.receives)
        return bool(role.leaves) or arrived or bool(self.held(role))

    def takers(self, program: HomeProgram, group: ChannelGroup) -> list[tuple[Channel, int]]:
        """Returns the arrival buffers that may take the value of a group of channels."""
        return [(c, i) for c in group for i in range(len(program.arrival_buffers.get(c, [])))]

    def _reserve(
        self,
        home: int,
        name: Name,
        dtypes: Sequence[tf.DType | None],
        places: Sequence[int],
    ) -> None:
        devices = [self.devices[home][place] for place in places]
        self._buffers.reserve(name.key, dtypes, devices)
        self._add(home, name, self._buffers.handles[name.key], places)

    def _add(
        self, home: int, name: Name, start: Sequence[tf.Tensor | None], places: Sequence[int]
    ) -> None:
        devices = [self.devices[home][place] for place in places]
        self.named[name] = Variable(pin_each(list(start), devices), devices, [*places])

    def nothing(self, channel: Channel, devices: Sequence[str]) -> Grads:
        """Returns tensors that stand for a missing value of a channel."""
        specs = self._machine.specs(channel.kind, channel.stage)
        return on_each(devices, lambda spec: None if spec is None else nothing(spec.dtype), specs)

    def held(self, role: Role) -> list[tuple[Name, Sequence[tf.Tensor | None], Sequence[int]]]:
        """Returns the parts of the state that an action changes, with their device indices."""
        stage, home = role.stage, self._stages[role.stage].of_home
        places: dict[str, Sequence[int]] = {}
        if role.kind == "F":
            places["carries"] = self._machine.traced[stage].carry_places
        if role.kind in "BI":
            places["carry_grads"] = self._machine.traced[stage].carry_places
        direction = "forward" if role.kind == "F" else "backward"
        if role.kind not in "RW" and self._machine.probes[direction][stage]:
            replicas = range(home.num_replicas)
            places[f"{direction}_notes"] = [replica * home.group for replica in replicas]
        if role.kind in "BW":
            places["accumulators"] = [total.place for total in self._machine.sums[stage]]
        held = [
            (Name(what, stage), vars(self._state)[what][stage] or [], of_part)
            for what, of_part in places.items()
        ]
        return [part for part in held if any(t is not None for t in part[1])]

    def flatten(self, values: Mapping[Name, Sequence[tf.Tensor | None]]) -> list[tf.Tensor]:
        """Returns the tensors of all variables."""
        return [t for name in self.named for t in values[name] if t is not None]

    def pack(self, flat: Sequence[tf.Tensor]) -> dict[Name, Grads]:
        """Returns the values of the variables."""
        tensors = iter(flat)
        return {
            name: [None if t is None else next(tensors) for t in variable.start]
            for name, variable in self.named.items()
        }

    def shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes that the tensors have at all ticks."""
        return [
            t.shape if variable.keeps_shapes else tf.TensorShape(None)  # type: ignore
            for variable in self.named.values()
            for t in variable.start
            if t is not None
        ]


class Table:
    """Columns of numbers with a row per tick, as a copy on each device."""

    def __init__(self, columns: Mapping[Any, Any], devices: Sequence[str], dtype: Any) -> None:
        self._order = {name: i for i, name in enumerate(columns)}
        self._rows = np.transpose([np.asarray(c, dtype) for c in columns.values()])
        self._devices = devices

    def row(self, ticks: Sequence[Any]) -> Callable[[int, Any], tf.Tensor]:
        """Returns a function that returns the number for a device and a column at a tick.

        The table is a constant in the loop's body. As a tensor from outside it would pass through
        each tick like a variable, with four operations.
        """
        rows = []
        for device, tick in zip(self._devices, ticks, strict=True):
            if not self._order:
                rows.append([])
                continue
            with tf.device(device):
                # Unlike `tf.gather`, it needs no constant for the axis.
                row = tf.raw_ops.Gather(
                    params=table(self._rows), indices=tick, validate_indices=False
                )
                rows.append(tf.unstack(row, num=len(self._order)))
        return lambda place, name: rows[place][self._order[name]]


class Branching:
    """A list of tensors in transit through actions, of which at most one is performed.

    TensorFlow's own conditionals pass the inputs of any branch through each branch, and lie on one
    device. Here each tensor is switched on its own device, only for those actions that use it.
    """

    def __init__(
        self, tensors: Sequence[tf.Tensor | None], devices: Sequence[str], places: Sequence[int]
    ) -> None:
        self._rest: Grads = list(tensors)
        self._devices = devices
        self._places = places
        self._shapes = [None if t is None else t.shape for t in tensors]
        self._results: list[Grads] = []

    def enter(self, predicate: Predicate) -> Grads:
        """Returns the values for one action, alive only if the predicate holds."""
        taken: Grads = [None] * len(self._rest)
        for i, tensor in enumerate(self._rest):
            if tensor is not None:
                with tf.device(self._devices[i]):
                    self._rest[i], taken[i] = switch(tensor, predicate(self._places[i]))
        return taken

    def leave(self, values: Sequence[tf.Tensor | None]) -> None:
        """Takes an action's results, of the same shapes; None stays None."""
        self._results.append(list(values))

    def merged(self) -> Grads:
        """Returns the values after the action that was performed, if any."""
        return _with_shapes(merged([self._rest, *self._results], self._devices), self._shapes)


class Fan:
    """A list of tensors that goes to one of several users, chosen when the step runs.

    It needs one operation per tensor; `Branching` needs one for each user.
    """

    def __init__(
        self,
        tensors: Sequence[tf.Tensor | None],
        devices: Sequence[str],
        places: Sequence[int],
        number: Number,  # of the user, int32; `count` means none of them
        count: int,
    ) -> None:
        self._devices = devices
        self._shapes = [None if t is None else t.shape for t in tensors]
        self._results: list[Grads] = [[None] * len(tensors) for _ in range(count + 1)]
        for i, (tensor, device, place) in enumerate(zip(tensors, devices, places, strict=True)):
            if tensor is None:
                continue
            with tf.device(device):
                sides = switch_to(tensor, number(place), count + 1)
            for result, side in zip(self._results, sides, strict=True):
                result[i] = side

    def to(self, user: int) -> Grads:
        """Returns the values for one user, with its changes so far."""
        return self._results[user]

    def leave(self, user: int, values: Sequence[tf.Tensor | None]) -> None:
        """Takes a user's results, of the same shapes."""
        self._results[user] = [*values]

    def merged(self) -> Grads:
        """Returns the values after the chosen user, if any."""
        return _with_shapes(merged(self._results, self._devices), self._shapes)


def merged(choices: Sequence[Sequence[tf.Tensor | None]], devices: Sequence[str]) -> Grads:
    """Returns the live list among several lists of tensors; None where no list has a tensor."""
    if len(choices) == 1:
        return [*choices[0]]
    chosen: Grads = []
    for device, *tensors in zip(devices, *choices, strict=True):
        present = [t for t in tensors if t is not None]
        with tf.device(device):
            chosen.append(merge(present) if present else None)
    return chosen


def _with_shapes(tensors: Grads, shapes: Sequence[tf.TensorShape | None]) -> Grads:
    for tensor, shape in zip(tensors, shapes, strict=True):
        if tensor is not None:
            tensor.set_shape(shape)
    return tensors
