"""A schedule as numbers: the action of each home at each tick, and the buffers it uses.

The body of the loop has each kind of action of each home once, its `Role`. Tables of numbers, with
a row per tick, say which role is due, for which microbatch, and where its values are.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.table.machine import Channel, Key, channels_read, channels_written, key_of
from pipemesh.schedule import Action
from pipemesh.schedule.action import GRADS, OUTPUTS

# Maximum number of one-value buffers for a channel that arrives at a home. A channel with more
# values in transit has one indexed buffer. TensorFlow reads a list after everything that was put
# into it, so its reader waits for later values, too.
MAX_ARRIVAL_BUFFERS = 4
# The change of an arrival buffer at a tick.
KEEPS, TAKES, CLEARS = 0, 1, 2
NOTHING = -1
# A number for each tick.
Column = np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Role:
    """A kind of action of a stage, whose microbatch is data, and the values it uses and makes."""

    kind: str
    stage: int
    mode: Mode
    takes: tuple[Key, ...]  # from home buffers
    puts: tuple[Key, ...]  # into home buffers, until an action takes them
    leaves: tuple[Key, ...]  # results of the pipeline, which no action takes
    receives: tuple[Channel, ...]  # read from other homes
    sends: tuple[Channel, ...]  # to another home


class Roles:
    """The roles of all actions of a run."""

    def __init__(
        self,
        order: Sequence[Action],
        stage_devices: Sequence[int],
        modes: Mapping[tuple[int, int], Mode],
    ) -> None:
        self._homes = stage_devices
        self._modes = modes
        codes = {self._code(action): modes[action.stage, action.microbatch] for action in order}
        # Other values are not kept: a forward-only schedule has no backward pass.
        self._taken = {
            channel
            for (kind, stage, _), mode in codes.items()
            for channel in self._needs(kind, stage, mode)
        }
        self._roles = {code: self._role(*code[:2], mode) for code, mode in codes.items()}

    def of(self, action: Action) -> Role:
        """Returns the role of an action."""
        return self._roles[self._code(action)]

    def _code(self, action: Action) -> tuple[str, int, str]:
        mode = self._modes[action.stage, action.microbatch]
        return action.kind, action.stage, mode.name

    def user(self, channel: Channel) -> int:
        """Returns the stage that takes the values of a channel."""
        return channel.stage + (1 if channel.kind == OUTPUTS else -1)

    def _role(self, kind: str, stage: int, mode: Mode) -> Role:
        results = Channel(OUTPUTS, len(self._homes) - 1), Channel(GRADS, 0)
        needed, written = self._needs(kind, stage, mode), channels_written(kind, stage)
        made = [channel for channel in written if channel in self._taken]

        def keys(channels: Sequence[Channel]) -> tuple[Key, ...]:
            return tuple(key_of(channel, mode) for channel in channels)

        return Role(
            kind,
            stage,
            mode,
            takes=keys([channel for channel in needed if not self._crosses(channel)]),
            puts=keys([channel for channel in made if not self._crosses(channel)]),
            leaves=keys([channel for channel in written if channel in results]),
            receives=tuple(filter(self._crosses, needed)),
            sends=tuple(filter(self._crosses, made)),
        )

    def _crosses(self, channel: Channel) -> bool:
        if channel.kind not in (OUTPUTS, GRADS):
            return False
        return self._homes[channel.stage] != self._homes[self.user(channel)]

    def _needs(self, kind: str, stage: int, mode: Mode) -> list[Channel]:
        channels = channels_read(kind, stage, mode.is_apart)
        return [channel for channel in channels if 0 <= channel.stage < len(self._homes)]


class HomeBuffer(NamedTuple):
    """The one buffer of all values of a dtype that stay on a device of a home.

    Each loop variable costs several operations per tick, and each one that an action may change
    costs another operation. The actions of a home run in turn, so sharing a buffer makes none of
    them wait.
    """

    home: int
    place: int
    dtype: Any


class Access(NamedTuple):
    """One value that an action takes from a home buffer, or puts there."""

    buffer: HomeBuffer
    number: int  # of earlier accesses of the action to this buffer


# The home buffer of each tensor of a value; None for a missing tensor.
BuffersOf = Callable[[Key], Sequence[HomeBuffer | None]]
Accesses = Mapping[Key, Sequence[Access | None]]
# The home buffers of a value's tensors, and their slots by microbatch.
_Move = tuple[Sequence[HomeBuffer], dict[int, list[int]]]


class HomeProgram:
    """The actions of one home, tick by tick."""

    def __init__(self, num_ticks: int) -> None:
        self.roles: list[Role] = []
        self.accesses: list[Accesses] = []  # of each role to home buffers
        self.code: Column = np.full(num_ticks, NOTHING)  # the number of a role
        self.microbatch: Column = np.zeros(num_ticks, int)
        self.slots: dict[Access, Column] = {}
        # where the action at a tick puts or takes a value, by indexed buffer
        self.indices: dict[Key, Column] = {}
        # the change of each one-value buffer at a tick
        self.arrival_buffers: dict[Channel, list[Column]] = {}
        self.arrival_reads: dict[Channel, Column] = {}  # the number of the buffer that is read
        self.indexed_arrivals: dict[Channel, Column] = {}  # the index of the put at a tick

    @property
    def buffers(self) -> list[HomeBuffer]:
        """The home buffers."""
        return [*dict.fromkeys(access.buffer for access in self.slots)]

    def add(
        self, role: Role, ticks: Sequence[int], microbatches: Sequence[int], slots: Slots
    ) -> None:
        """Adds the actions of a role."""
        count = len(self.code)
        self.code[ticks], self.microbatch[ticks] = len(self.roles), microbatches
        self.roles.append(role)
        self.accesses.append(accesses := slots.accesses(role))
        for key, of_key in accesses.items():
            present = [access for access in of_key if access is not None]
            chosen = np.reshape(
                [slots.of(key)[m] for m in microbatches], [len(ticks), len(present)]
            )
            for access, column in zip(present, chosen.T, strict=True):
                self.slots.setdefault(access, np.zeros(count, int))[ticks] = column
        for key in role.leaves:
            self.indices.setdefault(key, np.zeros(count, int))[ticks] = microbatches

    def arrive(self, channel: Channel, spans: Sequence[tuple[int, int]]) -> int:
        """Chooses buffers for the spans in which values wait; returns how many are needed."""
        count = len(self.code)
        until: list[int] = []
        chosen: list[int] = []
        for begin, end in spans:
            buffer = next((b for b, busy in enumerate(until) if busy <= begin), len(until))
            until[buffer:] = [end, *until[buffer + 1 :]]
            chosen.append(buffer)
        if len(until) > MAX_ARRIVAL_BUFFERS:
            begins, ends = map(list, zip(*spans, strict=True))
            put, take = np.full(count, NOTHING), np.zeros(count, int)
            put[begins] = take[ends] = chosen
            self.indexed_arrivals[channel], self.indices[key_of(channel)] = put, take
            return len(until)
        buffers = [np.full(count, CLEARS) for _ in until]
        reads = np.full(count, NOTHING)
        for (begin, end), buffer in zip(spans, chosen, strict=True):
            buffers[buffer][begin] = TAKES
            buffers[buffer][begin + 1 : end] = KEEPS
            reads[end] = buffer
        self.arrival_buffers[channel], self.arrival_reads[channel] = buffers, reads
        return len(until)


class Slots:
    """The slots of values in home buffers."""

    def __init__(
        self, order: Sequence[Action], roles: Roles, num_microbatches: int, buffers_of: BuffersOf
    ) -> None:
        self.sizes: dict[Key | HomeBuffer, int] = {}  # the maximum number of values at once
        self._buffers_of = functools.cache(buffers_of)
        self._free: dict[HomeBuffer, list[int]] = {}
        self._slots: dict[Key, dict[int, list[int]]] = {}
        # Looked up once per role, because there are many actions.
        moves: dict[Role, tuple[list[_Move], list[_Move]]] = {}
        for action in order:
            role, m = roles.of(action), action.microbatch
            if role not in moves:
                moves[role] = self._moves(role.takes), self._moves(role.puts)
                # All of them are joined at the end.
                self.sizes.update(dict.fromkeys(role.leaves, num_microbatches))
            takes, puts = moves[role]
            for buffers, slots in takes:
                for buffer, slot in zip(buffers, slots[m], strict=True):
                    heapq.heappush(self._free[buffer], slot)
            for buffers, slots in puts:
                slots[m] = [self._slot(buffer) for buffer in buffers]

    def of(self, key: Key) -> Mapping[int, Sequence[int]]:
        """Returns by microbatch the slots of the tensors of a value that stays."""
        return self._slots[key]

    def accesses(self, role: Role) -> dict[Key, list[Access | None]]:
        """Returns the accesses of an action to home buffers."""
        counts = collections.Counter[HomeBuffer]()
        accesses: dict[Key, list[Access | None]] = {}
        for key in (*role.takes, *role.puts):
            accesses[key] = []
            for buffer in self._buffers_of(key):
                if buffer is None:
                    accesses[key].append(None)
                    continue
                accesses[key].append(Access(buffer, counts[buffer]))
                counts[buffer] += 1
        return accesses

    def _moves(self, keys: Sequence[Key]) -> list[_Move]:
        return [
            (
                [buffer for buffer in self._buffers_of(key) if buffer is not None],
                self._slots.setdefault(key, {}),
            )
            for key in keys
        ]

    def _slot(self, buffer: HomeBuffer) -> int:
        free = self._free.setdefault(buffer, [])
        if free:
            return heapq.heappop(free)
        self.sizes[buffer] = self.sizes.get(buffer, 0) + 1
        return self.sizes[buffer] - 1


def program(
    actions: Sequence[Action], stage_devices: Sequence[int], roles: Roles, slots: Slots
) -> tuple[dict[int, HomeProgram], int]:
    """Returns the program of each home, and the number of ticks.

    An action's tick is the first after its home's last action and all that it receives.
    """
    free = [0] * (max(stage_devices) + 1)
    sent: dict[Channel, dict[int, int]] = {}  # ticks, by microbatch
    performed: dict[Role, tuple[list[int], list[int]]] = {}  # ticks, and their microbatches
    for action in actions:
        home, role, m = stage_devices[action.stage], roles.of(action), action.microbatch
        tick = max([free[home], *(sent[channel][m] + 1 for channel in role.receives)])
        free[home] = tick + 1
        for channel in role.sends:
            sent.setdefault(channel, {})[m] = tick
        ticks, microbatches = performed.setdefault(role, ([], []))
        ticks.append(tick)
        microbatches.append(m)
    homes: dict[int, HomeProgram] = {}
    spans: dict[Channel, list[tuple[int, int]]] = {}
    for role, (ticks, microbatches) in performed.items():
        home_program = homes.setdefault(stage_devices[role.stage], HomeProgram(max(free)))
        home_program.add(role, ticks, microbatches, slots)
        for channel in role.receives:
            waits = [(sent[channel][m], tick) for tick, m in zip(ticks, microbatches, strict=True)]
            spans.setdefault(channel, []).extend(waits)
    for channel, waits in spans.items():
        home_program = homes[stage_devices[roles.user(channel)]]
        slots.sizes[key_of(channel)] = home_program.arrive(channel, sorted(waits))
    return homes, max(free)
