"""What goes from tick to tick: state of stages, lists, registers, and tables of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.devices import processor_beside
from pipemesh.backend.operations import pin_each, table
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import OUTPUTS, Channel
from pipemesh.recurrent.table.lists import Lists, nothing
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.state import State
from pipemesh.recurrent.table.ticks.codes import Code, Role, key_of
from pipemesh.recurrent.table.ticks.program import (
    CLEARS,
    KEEPS,
    NOTHING,
    TAKES,
    Access,
    Column,
    HomeProgram,
)

# Channels from one home to another of which a tick has at most one, sent as one.
Wire = tuple[Channel, ...]


class Name(NamedTuple):
    """Of a variable: what it is, and of what."""

    what: str
    key: Any
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Variable:
    """Tensors that go from tick to tick.

    Attributes:
        start: their values before the first one.
        devices: where they lie.
        places: the numbers of these devices in their home.
        keeps_shapes: whether their shapes are always those of the start.
    """

    start: Grads
    devices: list[str]
    places: list[int]
    keeps_shapes: bool = True


class Variables:
    """All variables of a loop.

    Args:
        programs: what each home does.
        machine: the stages, ready to act.
        stages: the stages.
        homes: for each stage the number of its home.
        state: before the loop.
        lists: those that are there; those that the loop needs are added.

    Attributes:
        devices: of each home.
        named: the variables.
        flags: for each home a table of booleans, a row a tick, one for each of its devices.
        numbers: for each home a table of numbers, likewise.
        wires: for each channel that arrives somewhere, all those that are sent with it.
    """

    def __init__(
        self,
        programs: Mapping[int, HomeProgram],
        machine: Machine,
        stages: Sequence[Stage],
        homes: Sequence[int],
        state: State,
        lists: Lists,
    ) -> None:
        self._machine = machine
        self._stages = stages
        self._state = state
        self._lists = lists
        self.devices = {
            home: list(stage.devices) for home, stage in zip(homes, stages, strict=True)
        }
        self.named: dict[Name, Variable] = {}
        self.flags: dict[int, Table] = {}
        self.numbers: dict[int, Table] = {}
        self.wires: dict[Channel, Wire] = {}
        for home, own in programs.items():
            self._add_wires([*own.registers, *own.arrivals], homes)
            self._add_home(home, own)

    def _add_wires(self, channels: Sequence[Channel], homes: Sequence[int]) -> None:
        """Joins those of one home's arrivals that come from one home, and are alike.

        A home performs an action a tick, and an action sends one thing at most. Sending and waiting
        for nothing takes as long as all of the operations of a small action.
        """
        alike: dict[Any, list[Channel]] = {}
        for channel in channels:
            specs = [
                None if spec is None else (str(spec.shape), spec.dtype)
                for spec in self._machine.specs(*channel)
            ]
            places = self._machine.places(*channel), self.arrival_places(channel)
            alike.setdefault(repr((homes[channel.stage], specs, places)), []).append(channel)
        self.wires |= {c: tuple(wire) for wire in alike.values() for c in wire}

    def sending_devices(self, channel: Channel) -> list[str]:
        """Where what a channel hands on is made."""
        devices = self._stages[channel.stage].devices
        return [devices[place] for place in self._machine.places(*channel)]

    def _add_home(self, home: int, own: HomeProgram) -> None:
        hosts = [processor_beside(device) for device in self.devices[home]]
        places = [*range(len(hosts))]
        zeros: Grads = [_constant(0, tf.int32, host) for host in hosts]
        self.named[Name("tick", home)] = Variable(zeros, hosts, places)
        tokens: Grads = []
        for device, ends in zip(self.devices[home], self._state.tokens[home], strict=True):
            with tf.control_dependencies(ends), tf.device(device):
                tokens.append(tf.ensure_shape(tf.zeros([]), []))
        self.named[Name("token", home)] = Variable(tokens, self.devices[home], places)
        for role in own.roles:
            for name, tensors, places in self.held(role.code):
                self._add(home, name, tensors, places)
        flags: dict[Any, Any] = {
            ("code", i): _where(own.code, i)
            for i, role in enumerate(own.roles)
            if self._branches(role, own)
        }
        idle = len(own.roles)
        numbers: dict[Any, Any] = {
            "code": [idle if code == NOTHING else code for code in own.code],
            "microbatch": own.microbatch,
        }
        for channel, registers in own.registers.items():
            for number, column in enumerate(registers):
                self._add_register(home, channel, number)
                for becomes in (KEEPS, CLEARS):
                    flags[channel, number, becomes] = _where(column, becomes)
                flags["read", channel, number] = _where(own.reads[channel], number)
            takers = self.takers(own, channel)
            numbers["takes", self.wires[channel]] = self._taker(own, takers)
        for channel, column in own.arrivals.items():
            flags["arrives", channel] = ~_where(column, NOTHING)
            numbers["arrives", channel] = [max(0, index) for index in column]
            places = self.arrival_places(channel)
            self._lists.elsewhere[key_of(channel)] = [self.devices[home][p] for p in places]
            # What a loop before has left is empty.
            self._lists.handles.pop(key_of(channel), None)
        for key, column in own.indices.items():
            numbers["index", key] = column
            channel = Channel(key.kind, key.stage)
            places = self._machine.places(*key)
            if channel in own.arrivals:
                places = self.arrival_places(channel)
            self._lists.reserve([key])
            self._add(home, Name("list", key), self._lists.handles[key], places)
        for shelf, columns in own.slots.items():
            for number, column in enumerate(columns):
                numbers[Access(shelf, number)] = column
            self._lists.reserve_one(shelf, shelf.dtype, self.devices[home][shelf.place])
            self._add(home, Name("shelf", shelf), self._lists.handles[shelf], [shelf.place])
        self.flags[home] = Table(flags, hosts, np.bool_)
        self.numbers[home] = Table(numbers, hosts, np.int32)

    def _branches(self, role: Role, own: HomeProgram) -> bool:
        """Whether a kind of action changes what not all kinds do."""
        listed = any(key in own.indices for key in role.puts)
        arrived = any(channel in own.arrivals for channel in role.hears)
        return listed or arrived or bool(self.held(role.code))

    def takers(self, own: HomeProgram, channel: Channel) -> list[tuple[Channel, int]]:
        """The registers that may take what comes by the wire of a channel."""
        return [(c, i) for c in self.wires[channel] for i in range(len(own.registers.get(c, [])))]

    def _taker(self, own: HomeProgram, takers: Sequence[tuple[Channel, int]]) -> np.ndarray:
        """At each tick the number of the one that does, or how many there are."""
        chosen = np.full(len(own.code), len(takers))
        for i, (channel, number) in enumerate(takers):
            chosen[_where(own.registers[channel][number], TAKES)] = i
        return chosen

    def _add(
        self, home: int, name: Name, start: Sequence[tf.Tensor | None], places: Sequence[int]
    ) -> None:
        devices = [self.devices[home][place] for place in places]
        self.named[name] = Variable(pin_each(list(start), devices), devices, [*places])

    def _add_register(self, home: int, channel: Channel, number: int) -> None:
        places = self.arrival_places(channel)
        devices = [self.devices[home][place] for place in places]
        start = self.nothing(channel, devices)
        self.named[Name("register", channel, number)] = Variable(start, devices, places, False)

    def arrival_places(self, channel: Channel) -> list[int]:
        """Where in the home of its user what a channel hands on arrives."""
        if channel.kind == OUTPUTS:
            return self._machine.input_places(channel.stage + 1)
        return self._machine.places(OUTPUTS, channel.stage - 1)

    def nothing(self, channel: Channel, devices: Sequence[str]) -> Grads:
        """Tensors that stand for those of a channel where there are none."""
        made: Grads = []
        specs = self._machine.specs(channel.kind, channel.stage)
        for spec, device in zip(specs, devices, strict=True):
            with tf.device(device):
                made.append(None if spec is None else nothing(spec.dtype))
        return made

    def held(self, code: Code) -> list[tuple[Name, Sequence[tf.Tensor | None], Sequence[int]]]:
        """What of its stage's state an action of a kind changes, and the places where it lies."""
        state, stage = self._state, code.stage
        home = self._stages[stage].of_home
        replicas = [replica * home.group for replica in range(home.num_replicas)]
        found: list[tuple[Name, Sequence[tf.Tensor | None], Sequence[int]]] = []
        direction = "forward" if code.kind == "F" else "backward"
        if code.kind == "F":
            carry = state.carries[stage]
            found.append((Name("carries", stage), carry, [0] * len(carry)))
        if code.kind in "BI":
            grads = state.carry_grads[stage]
            found.append((Name("carry_grads", stage), grads, [0] * len(grads)))
        if code.kind not in "RW" and self._machine.probes[direction][stage]:
            found.append((Name(direction, stage), state.notes[direction][stage], replicas))
        if code.kind in "BW":
            places = self._machine.passes(stage, code.mode.backward).accumulator_places
            found.append((Name("accumulators", stage), state.accumulators[stage] or [], places))
        return [(name, tensors, places) for name, tensors, places in found if any_of(tensors)]

    def flatten(self, values: Mapping[Name, Sequence[tf.Tensor | None]]) -> list[tf.Tensor]:
        """The tensors of all variables."""
        return [t for name in self.named for t in values[name] if t is not None]

    def pack(self, flat: Sequence[tf.Tensor]) -> dict[Name, Grads]:
        """The values of the variables."""
        each = iter(flat)
        return {
            name: [None if t is None else next(each) for t in variable.start]
            for name, variable in self.named.items()
        }

    def shapes(self) -> list[tf.TensorShape]:
        """Those that the tensors have at all ticks."""
        return [
            t.shape if variable.keeps_shapes else tf.TensorShape(None)  # type: ignore
            for variable in self.named.values()
            for t in variable.start
            if t is not None
        ]


class Table:
    """Columns of numbers of which each tick has a row.

    Args:
        columns: by their names.
        devices: where there is one.
        dtype: of the numbers.
    """

    def __init__(self, columns: Mapping[Any, Any], devices: Sequence[str], dtype: Any) -> None:
        self._order = {name: i for i, name in enumerate(columns)}
        self._rows = np.transpose([np.asarray(c, dtype) for c in columns.values()])
        self._devices = devices

    def row(self, ticks: Sequence[Any]) -> Callable[[int, Any], tf.Tensor]:
        """What gives for a device and a column's name the number of a tick.

        The table is a constant of the loop's body. One from outside would go through each tick like
        a variable, by four operations.

        Args:
            ticks: the number of the tick, on each device.
        """
        rows = []
        for device, tick in zip(self._devices, ticks, strict=True):
            if not self._order:
                rows.append([])
                continue
            with tf.device(device):
                # Unlike `tf.gather` without a constant for the axis.
                found = tf.raw_ops.Gather(
                    params=table(self._rows), indices=tick, validate_indices=False
                )
                rows.append(tf.unstack(found, num=len(self._order)))
        return lambda place, name: rows[place][self._order[name]]


def any_of(tensors: Sequence[tf.Tensor | None]) -> bool:
    """Whether there is a tensor."""
    return any(t is not None for t in tensors)


def _where(column: Column, number: int) -> np.ndarray:
    return np.asarray(column) == number


def _constant(value: Any, dtype: tf.DType, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.constant(value, dtype)
