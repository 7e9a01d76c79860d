"""A run whose repeating actions are a loop of the graph.

A loop stands for many actions, so a value may be made in one repetition and used in another.
Where both are in one loop, as in the steady state of 1F1B, the distance between them is the
same for every microbatch, and the values on their way are loop variables that move up by one
place a repetition. Where they are in different loops, as in GPipe, values of all microbatches
exist at once, and they lie in a list by the number of their microbatch; an element is cleared
when it was taken, so that its memory is free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import MaybeTensor
from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.passes.part import Grads
from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.table.kinds import (
    GRADS,
    OUTPUTS,
    Channel,
    Kind,
    Slot,
    given,
    taken,
)
from pipemesh.recurrent.table.listed import Listed
from pipemesh.recurrent.table.lists import Key, Lists
from pipemesh.recurrent.table.machine import Machine
from pipemesh.recurrent.table.state import State
from pipemesh.schedule import Action
from pipemesh.schedule.repeats import Loop

# A home, and the number of a device in it.
_Place = tuple[int, int]
# How backward passes are done, by stage and microbatch.
_Modes = Mapping[tuple[int, int], Mode]
_PARALLEL_ITERATIONS = 32


class Rolled(Listed):
    """Performs actions and loops of actions.

    Args:
        machine: performs actions.
        state: what stages hold.
        stages: the stages.
        inputs: of the pipeline, the whole batch.
        cutting: how the batch is cut.
        modes: of remat, for each stage and microbatch.
        items: everything that will be performed, in order.

    Attributes:
        state: what stages hold.
        lists: values that lie in lists.
        found: other values that were made and not yet used up.
        in_lists: the channels that lie in lists.
        sources: for channels that no action makes a function of the microbatch.
    """

    def __init__(
        self,
        machine: Machine,
        state: State,
        stages: Sequence[Stage],
        inputs: Sequence[tf.Tensor],
        cutting: Cutting,
        modes: _Modes,
        items: Sequence[Action | Loop],
    ) -> None:
        super().__init__(machine, state, stages, inputs, cutting)
        self.found: dict[Slot, list[Any]] = {}
        self._modes = modes
        # What comes out of the pipeline is taken by no action.
        self.in_lists = {Channel(OUTPUTS, len(stages) - 1), Channel(GRADS, 0)}
        for item in items:
            if isinstance(item, Loop):
                self.in_lists |= _unmatched(item, modes, len(stages))

    def perform(self, items: Sequence[Action | Loop]) -> None:
        """Performs actions and loops in order."""
        self.state.forget_tokens_of_other_graphs()
        for item in items:
            if isinstance(item, Loop):
                self._loop(item)
            else:
                name = self._cutting.text(item)
                self._act(item, tf.constant(item.microbatch, tf.int64), self.found, name)

    def _act(
        self, action: Action, microbatch: tf.Tensor, found: dict[Slot, list[Any]], name: str
    ) -> None:
        mode = self._modes[action.stage, action.microbatch]
        values = _Values(self, found, action.microbatch, microbatch, mode)
        with self.machine.acting(f"action_{name}", action.stage):
            self.machine.act(action.kind, action.stage, mode, microbatch, values)

    def _loop(self, loop: Loop) -> None:
        for stage in {action.stage for action in loop.body if action.kind not in "FR"}:
            self.machine.begin(stage, self.state)
        variables = _Variables(self, loop, self._list_keys(loop))

        def body(k: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
            found = variables.enter(flat)
            for action in loop.body:
                name = f"{self._cutting.text(action)}_and_every_{loop.shift}"
                self._act(action, action.microbatch + loop.shift * k, found, name)
            return [k + 1, *variables.leave(found)]

        count = tf.constant(loop.count, tf.int64)
        results = tf.while_loop(
            lambda k, *_: k < count,
            body,
            [tf.constant(0, tf.int64), *variables.start()],
            parallel_iterations=_PARALLEL_ITERATIONS,
        )
        variables.finish(results[1:])

    def _list_keys(self, loop: Loop) -> list[Key]:
        """The lists that a loop needs, all of which exist then."""
        made, used = _slots(loop, self._modes)
        keys = {
            Lists.key(kind, stage, self._modes[min(stage, len(self.stages) - 1), m])
            for (kind, stage), m in [*made, *used]
            if Channel(kind, stage) in self.in_lists
        }
        ordered = sorted(keys, key=lambda key: (key.kind, key.stage, key.mode.name))
        self.lists.reserve(ordered)
        return ordered


class _Values:
    """What one action reads and writes."""

    def __init__(
        self,
        rolled: Rolled,
        found: dict[Slot, list[Any]],
        number: int,
        microbatch: tf.Tensor,
        mode: Mode,
    ) -> None:
        self._rolled = rolled
        self._found = found
        self._number = number
        self._microbatch = microbatch
        self._mode = mode

    @property
    def state(self) -> State:
        return self._rolled.state

    def read(self, kind: Kind[MaybeTensor], stage: int) -> list[MaybeTensor]:
        rolled, channel = self._rolled, Channel(kind, stage)
        found: list[Any]
        if channel in rolled.sources:
            found = rolled.sources[channel](self._microbatch)
        elif channel in rolled.in_lists:
            found = rolled.lists.take(Lists.key(kind, stage, self._mode), self._microbatch)
        else:
            found = self._found[Slot(channel, self._number)]
        return found

    def write(self, kind: Kind[MaybeTensor], stage: int, value: Sequence[MaybeTensor]) -> None:
        rolled, channel = self._rolled, Channel(kind, stage)
        if channel in rolled.in_lists:
            rolled.lists.put(Lists.key(kind, stage, self._mode), self._microbatch, value)
        else:
            self._found[Slot(channel, self._number)] = [*value]


class _Variables:
    """The variables of a loop: state, lists, and values on their way to a later repetition."""

    def __init__(self, rolled: Rolled, loop: Loop, keys: Sequence[Key]) -> None:
        self._rolled = rolled
        self._shift = loop.shift
        self._count = loop.count
        self._keys = keys
        self._moving = [
            (used, distance)
            for _, used, distance in _matches(loop, rolled._modes)
            if distance and used.channel not in rolled.in_lists
        ]
        self._structure: Any = None
        self._outside: tuple[State, dict[Key, Grads]] | None = None
        homes = zip(rolled.machine.stage_devices, rolled.stages, strict=True)
        # By the number of the home, and that of the device in it.
        self._devices = {
            (home, number): device
            for home, stage in homes
            for number, device in enumerate(stage.devices)
        }

    def _collected(self, found: Mapping[Slot, list[Any]], repetition: int) -> list[Any]:
        """All values that go into a repetition; those on their way in order of their arrival."""
        moving = [
            [found[Slot(channel, m + (repetition + i) * self._shift)] for i in range(distance)]
            for (channel, m), distance in self._moving
        ]
        lists = [self._rolled.lists.handles[key] for key in self._keys]
        return [moving, self._rolled.state.values(), lists]

    def _spread(self, moving: Any, repetition: int) -> dict[Slot, list[Any]]:
        """The values on their way, by the slots that they have in a repetition."""
        return {
            Slot(channel, m + (repetition + i) * self._shift): value
            for ((channel, m), _), values in zip(self._moving, moving, strict=True)
            for i, value in enumerate(values)
        }

    def start(self) -> list[tf.Tensor]:
        """Their values before the loop."""
        rolled = self._rolled
        self._outside = rolled.state, rolled.lists.handles
        tokens = self._tokens({device: tf.zeros([]) for device in self._devices})
        self._structure = [self._collected(rolled.found, 0), tokens]
        return _flatten(self._structure)

    def enter(self, flat: Sequence[tf.Tensor]) -> dict[Slot, list[Any]]:
        """Takes the variables for state and lists; returns the values that have arrived."""
        moving, self._arrived_tokens = self._take(flat)
        return self._spread(moving, 0)

    def leave(self, found: Mapping[Slot, list[Any]]) -> list[tf.Tensor]:
        """Their values after a repetition: all on their way are one place closer."""
        return _flatten([self._collected(found, 1), self._tokens(self._arrived_tokens)])

    def finish(self, flat: Sequence[tf.Tensor]) -> None:
        """Hands what the loop has left to what comes after it."""
        assert self._outside is not None
        self._rolled.state, self._rolled.lists.handles = self._outside
        moving, _ = self._take(flat)
        self._rolled.found.update(self._spread(moving, self._count))

    def _take(self, flat: Sequence[tf.Tensor]) -> tuple[Any, dict[_Place, tf.Tensor]]:
        rolled = self._rolled
        (moving, values, lists), tokens = _pack(self._structure, flat)
        pinned = {}
        for device, token in tokens.items():
            with tf.device(self._devices[device]):
                # An operation of its own: a dependency on the loop would wait for all of it.
                pinned[device] = tf.ensure_shape(token, [])
        operations = [
            [[pinned[home, number].op] for number in range(len(devices))]
            for home, devices in enumerate(rolled.state.tokens)
        ]
        rolled.state = rolled.state.with_values(values, operations)
        rolled.lists.handles = {
            **rolled.lists.handles,
            **dict(zip(self._keys, lists, strict=True)),
        }
        return moving, pinned

    def _tokens(self, tensors: Mapping[_Place, tf.Tensor]) -> dict[_Place, tf.Tensor]:
        """Scalars that exist once the devices have finished their latest actions."""
        tokens = {}
        for device, tensor in tensors.items():
            home, number = device
            operations = self._rolled.state.tokens[home][number]
            with tf.control_dependencies(operations), tf.device(self._devices[device]):
                tokens[device] = tf.ensure_shape(tensor, [])
        return tokens


def _slots(loop: Loop, modes: _Modes) -> tuple[list[Slot], list[Slot]]:
    """The values that the first repetition makes and uses."""
    made: list[Slot] = []
    used: list[Slot] = []
    for action in loop.body:
        stage = action.stage
        takes = taken(action.kind, stage, modes[stage, action.microbatch].is_apart)
        used += [Slot(channel, action.microbatch) for channel in takes]
        made += [Slot(channel, action.microbatch) for channel in given(action.kind, stage)]
    return made, used


def _matches(loop: Loop, modes: _Modes) -> list[tuple[Slot, Slot, int]]:
    """What is made, what it is used as, and how many repetitions later that is."""
    made, used = _slots(loop, modes)
    matches = []
    for slot in made:
        for user in used:
            repetitions, rest = divmod(slot.microbatch - user.microbatch, loop.shift)
            if slot.channel == user.channel and rest == 0 and repetitions >= 0:
                matches.append((slot, user, repetitions))
    return matches


def _unmatched(loop: Loop, modes: _Modes, num_stages: int) -> set[Channel]:
    """Channels whose values come into a loop or out of it, instead of going around in it."""
    made, used = _slots(loop, modes)
    matches = _matches(loop, modes)
    lonely = {*made} - {slot for slot, _, _ in matches}
    lonely |= {*used} - {user for _, user, _ in matches}
    ends = {Channel(OUTPUTS, -1), Channel(GRADS, num_stages)}
    return {slot.channel for slot in lonely} - ends


def _flatten(structure: Any) -> list[tf.Tensor]:
    return [t for t in tf.nest.flatten(structure) if t is not None]


def _pack(structure: Any, flat: Sequence[tf.Tensor]) -> Any:
    values = iter(flat)
    packed = [None if t is None else next(values) for t in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, packed)
