"""A schedule as numbers: the action of each home at each tick, and the buffers it uses.

The body of the loop has each kind of action of each home once, its `Role`. Tables of numbers, with
a row per tick, say which role is due, for which microbatch, and where its values are.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.table.machine import GRADS, OUTPUTS, Channel, Key, given, key_of, taken
from pipemesh.schedule import Action

# Maximum number of one-value buffers for a channel that arrives at a home. A channel with more
# values in transit has one indexed buffer. TensorFlow reads a list after everything that was put
# into it, so its reader waits for later values, too.
MAX_ARRIVAL_BUFFERS = 4
# The change of an arrival buffer at a tick.
KEEPS, TAKES, CLEARS = 0, 1, 2
NOTHING = -1
Column = list[int]


class Code(NamedTuple):
    """A kind of action of a stage; its microbatch is data."""

    kind: str
    stage: int
    mode: Mode


@dataclasses.dataclass(frozen=True, eq=False)
class Role:
    """The values that a kind of action uses and makes; there is one role of each kind.

    Attributes:
        code: the kind of action.
        takes: the values that it takes from buffers of its home.
        puts: the values that it puts into buffers of its home.
        receives: the channels of other homes that it reads.
        sends: the channels that it sends to another home.
    """

    code: Code
    takes: tuple[Key, ...]
    puts: tuple[Key, ...]
    receives: tuple[Channel, ...]
    sends: tuple[Channel, ...]


class Roles:
    """The roles of all actions of a run.

    Args:
        order: all actions, in order.
        stage_devices: for each stage the number of its home.
        modes: of remat, for each stage and microbatch.
    """

    def __init__(
        self,
        order: Sequence[Action],
        stage_devices: Sequence[int],
        modes: Mapping[tuple[int, int], Mode],
    ) -> None:
        self._homes = stage_devices
        self._modes = modes
        self._by_kind: dict[tuple[str, int, str], Role] = {}
        # Values that no action takes are not kept: a forward-only schedule has no backward pass.
        self._taken: set[Channel] = set()
        codes = {
            Code(action.kind, action.stage, modes[action.stage, action.microbatch])
            for action in order
        }
        for code in codes:
            self._taken.update(self._needs(code))

    def of(self, action: Action) -> Role:
        """Returns the role of an action."""
        mode = self._modes[action.stage, action.microbatch]
        key = action.kind, action.stage, mode.name
        if key not in self._by_kind:
            self._by_kind[key] = self._role(Code(action.kind, action.stage, mode))
        return self._by_kind[key]

    def leaves(self, channel: Channel) -> bool:
        """Returns True if no action takes the values of a channel: they leave the pipeline."""
        return channel in (Channel(OUTPUTS, len(self._homes) - 1), Channel(GRADS, 0))

    def user(self, channel: Channel) -> int:
        """Returns the stage that takes the values of a channel."""
        return channel.stage + (1 if channel.kind == OUTPUTS else -1)

    def _role(self, code: Code) -> Role:
        needed = self._needs(code)
        made = [
            channel
            for channel in given(code.kind, code.stage)
            if channel in self._taken or self.leaves(channel)
        ]

        def local(channels: Sequence[Channel]) -> tuple[Key, ...]:
            kept = [channel for channel in channels if not self._crosses(channel)]
            return tuple(key_of(channel, code.mode) for channel in kept)

        return Role(
            code,
            local(needed),
            local(made),
            tuple(filter(self._crosses, needed)),
            tuple(filter(self._crosses, made)),
        )

    def _crosses(self, channel: Channel) -> bool:
        if channel.kind not in (OUTPUTS, GRADS) or self.leaves(channel):
            return False
        return self._homes[channel.stage] != self._homes[self.user(channel)]

    def _needs(self, code: Code) -> list[Channel]:
        channels = taken(code.kind, code.stage, code.mode.is_apart)
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
    """One value that an action takes from a home buffer, or puts there.

    Attributes:
        buffer: the home buffer.
        number: number of earlier accesses of the action to this buffer.
    """

    buffer: HomeBuffer
    number: int


# The home buffer of each tensor of a value; None for a missing tensor.
BuffersOf = Callable[[Key], Sequence[HomeBuffer | None]]
Accesses = Mapping[Key, Sequence[Access | None]]


@dataclasses.dataclass
class HomeProgram:
    """The actions of one home, tick by tick.

    Attributes:
        roles: its kinds of actions.
        accesses: for each role, the values that it takes from home buffers and puts there.
        code: for each tick the number of a role, `NOTHING` if the home is idle.
        microbatch: of the action.
        slots: for each home buffer, the slot of each access of the action at a tick.
        indices: for each indexed buffer, the index at which the action at a tick puts or takes a
            value.
        arrival_buffers: for each channel that arrives in buffers of one value, their change at each
            tick.
        arrival_reads: for those channels, the number of the buffer that is read at each tick.
        indexed_arrivals: for channels that arrive in an indexed buffer, the index of the put at
            each tick.
    """

    roles: list[Role]
    accesses: list[Accesses]
    code: Column
    microbatch: Column
    slots: dict[HomeBuffer, list[Column]]
    indices: dict[Key, Column]
    arrival_buffers: dict[Channel, list[Column]]
    arrival_reads: dict[Channel, Column]
    indexed_arrivals: dict[Channel, Column]


# The home buffers of a value's tensors, and their slots by microbatch.
_Move = tuple[Sequence[HomeBuffer], dict[int, list[int]]]


class Slots:
    """The slots of values in home buffers.

    Args:
        order: all actions of a run, in order.
        roles: of these.
        num_microbatches: number of microbatches.
        buffers_of: the home buffer of each tensor of a value.

    Attributes:
        sizes: for each buffer, the maximum number of values at once.
    """

    def __init__(
        self, order: Sequence[Action], roles: Roles, num_microbatches: int, buffers_of: BuffersOf
    ) -> None:
        self.sizes: dict[Key | HomeBuffer, int] = {}
        self._roles = roles
        self._buffers_of = buffers_of
        self._buffers: dict[Key, Sequence[HomeBuffer | None]] = {}
        self._free: dict[HomeBuffer, list[int]] = {}
        self._slots: dict[Key, dict[int, list[int]]] = {}
        # Looked up once per role, because there are many actions.
        moves: dict[Role, tuple[list[_Move], list[_Move]]] = {}
        for action in order:
            role, m = roles.of(action), action.microbatch
            if role not in moves:
                moves[role] = self._moves(role.takes), self._moves(role.puts)
                for key in role.puts:
                    if not self.stays(key):
                        # All of them are joined at the end.
                        self.sizes[key] = num_microbatches
            takes, puts = moves[role]
            for buffers, slots in takes:
                for buffer, slot in zip(buffers, slots[m], strict=True):
                    heapq.heappush(self._free[buffer], slot)
            for buffers, slots in puts:
                slots[m] = [self._slot(buffer) for buffer in buffers]

    def stays(self, key: Key) -> bool:
        """Returns True if a value stays in home buffers until an action takes it."""
        return not self._roles.leaves(Channel(key.kind, key.stage))

    def of(self, key: Key) -> Mapping[int, Sequence[int]]:
        """Returns by microbatch the slots of the tensors of a value that stays."""
        return self._slots[key]

    def accesses(self, role: Role) -> dict[Key, list[Access | None]]:
        """Returns the accesses of an action to home buffers."""
        counts: dict[HomeBuffer, int] = {}
        accesses: dict[Key, list[Access | None]] = {}
        for key in filter(self.stays, (*role.takes, *role.puts)):
            accesses[key] = []
            for buffer in self._of(key):
                if buffer is None:
                    accesses[key].append(None)
                    continue
                accesses[key].append(Access(buffer, counts.get(buffer, 0)))
                counts[buffer] = counts.get(buffer, 0) + 1
        return accesses

    def _of(self, key: Key) -> Sequence[HomeBuffer | None]:
        if key not in self._buffers:
            self._buffers[key] = self._buffers_of(key)
        return self._buffers[key]

    def _moves(self, keys: Sequence[Key]) -> list[_Move]:
        return [
            (
                [buffer for buffer in self._of(key) if buffer is not None],
                self._slots.setdefault(key, {}),
            )
            for key in keys
            if self.stays(key)
        ]

    def _slot(self, buffer: HomeBuffer) -> int:
        free = self._free.setdefault(buffer, [])
        if free:
            return heapq.heappop(free)
        self.sizes[buffer] = self.sizes.get(buffer, 0) + 1
        return self.sizes[buffer] - 1


def ticks_of(actions: Sequence[Action], roles: Roles, stage_devices: Sequence[int]) -> list[int]:
    """Returns each action's tick: the first after its home's last action and all it receives."""
    free = [0] * (max(stage_devices) + 1)
    sent: dict[Channel, dict[int, int]] = {}
    by_role: dict[Role, tuple[list[dict[int, int]], list[dict[int, int]]]] = {}
    ticks: list[int] = []
    for action in actions:
        home, role, m = stage_devices[action.stage], roles.of(action), action.microbatch
        if role not in by_role:
            by_role[role] = (
                [sent.setdefault(channel, {}) for channel in role.receives],
                [sent.setdefault(channel, {}) for channel in role.sends],
            )
        receives, sends = by_role[role]
        tick = max([free[home], *(ticks_sent[m] + 1 for ticks_sent in receives)])
        for ticks_sent in sends:
            ticks_sent[m] = tick
        free[home] = tick + 1
        ticks.append(tick)
    return ticks


def program(
    actions: Sequence[Action], stage_devices: Sequence[int], roles: Roles, slots: Slots
) -> tuple[dict[int, HomeProgram], int]:
    """Returns the program of each home, and the number of ticks."""
    ticks = ticks_of(actions, roles, stage_devices)
    count = max(ticks) + 1
    homes: dict[int, HomeProgram] = {}
    sent: dict[Channel, dict[int, int]] = {}
    spans: dict[Channel, list[tuple[int, int]]] = {}
    columns: dict[Role, _RoleColumns] = {}
    for action, tick in zip(actions, ticks, strict=True):
        home, role, m = stage_devices[action.stage], roles.of(action), action.microbatch
        if role not in columns:
            home_program = homes.setdefault(home, _idle(count))
            columns[role] = _columns(home_program, role, slots, sent, spans)
        _note(columns[role], tick, m)
    for channel, waits in spans.items():
        home_program = homes[stage_devices[roles.user(channel)]]
        slots.sizes[key_of(channel)] = _arrive(home_program, channel, sorted(waits), count)
    return homes, count


@dataclasses.dataclass(frozen=True)
class _RoleColumns:
    """The columns that actions of one role fill in.

    Attributes:
        program: of its home.
        number: of the role in the program.
        slots: for each value that stays its slots by microbatch, and their columns.
        indexed: the columns of the values that it puts into indexed buffers.
        receives: for each channel the ticks of its sends, and the first and last tick of each wait.
        sends: for each channel the ticks of its sends.
    """

    program: HomeProgram
    number: int
    slots: list[tuple[Mapping[int, Sequence[int]], list[Column]]]
    indexed: list[Column]
    receives: list[tuple[dict[int, int], list[tuple[int, int]]]]
    sends: list[dict[int, int]]


def _columns(
    home: HomeProgram,
    role: Role,
    slots: Slots,
    sent: dict[Channel, dict[int, int]],
    spans: dict[Channel, list[tuple[int, int]]],
) -> _RoleColumns:
    """Adds a role to its home."""
    count, accesses = len(home.code), slots.accesses(role)
    home.roles.append(role)
    home.accesses.append(accesses)

    def column(access: Access) -> Column:
        columns = home.slots.setdefault(access.buffer, [])
        while len(columns) <= access.number:
            columns.append([0] * count)
        return columns[access.number]

    return _RoleColumns(
        home,
        len(home.roles) - 1,
        [
            (slots.of(key), [column(access) for access in of_key if access is not None])
            for key, of_key in accesses.items()
        ],
        [home.indices.setdefault(key, [0] * count) for key in role.puts if not slots.stays(key)],
        [
            (sent.setdefault(channel, {}), spans.setdefault(channel, []))
            for channel in role.receives
        ],
        [sent.setdefault(channel, {}) for channel in role.sends],
    )


def _note(columns: _RoleColumns, tick: int, microbatch: int) -> None:
    """Fills in an action."""
    columns.program.code[tick] = columns.number
    columns.program.microbatch[tick] = microbatch
    for slots, of_slots in columns.slots:
        for column, slot in zip(of_slots, slots[microbatch], strict=True):
            column[tick] = slot
    for column in columns.indexed:
        column[tick] = microbatch
    for sent, spans in columns.receives:
        spans.append((sent[microbatch], tick))
    for sent in columns.sends:
        sent[microbatch] = tick


def _idle(count: int) -> HomeProgram:
    return HomeProgram([], [], [NOTHING] * count, [0] * count, {}, {}, {}, {}, {})


def _arrive(
    home: HomeProgram, channel: Channel, spans: Sequence[tuple[int, int]], count: int
) -> int:
    """Chooses buffers for arriving values and returns the maximum number of values at once.

    Each span is the tick at whose end a value arrives, and the tick that uses it.
    """
    until: list[int] = []
    chosen: list[int] = []
    for begin, end in spans:
        buffer = next((b for b, busy in enumerate(until) if busy <= begin), len(until))
        until[buffer:] = [end, *until[buffer + 1 :]]
        chosen.append(buffer)
    if len(until) > MAX_ARRIVAL_BUFFERS:
        put, take = [NOTHING] * count, [0] * count
        for (begin, end), index in zip(spans, chosen, strict=True):
            put[begin], take[end] = index, index
        home.indexed_arrivals[channel], home.indices[key_of(channel)] = put, take
        return len(until)
    buffers = [[CLEARS] * count for _ in until]
    reads = [NOTHING] * count
    for (begin, end), buffer in zip(spans, chosen, strict=True):
        buffers[buffer][begin] = TAKES
        buffers[buffer][begin + 1 : end] = [KEEPS] * (end - begin - 1)
        reads[end] = buffer
    home.arrival_buffers[channel], home.arrival_reads[channel] = buffers, reads
    return len(until)
