"""A table as numbers: what each home does at each tick, and where it finds what others made."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipemesh.recurrent.table.kinds import Channel
from pipemesh.recurrent.table.lists import Key
from pipemesh.recurrent.table.ticks.codes import Role, Roles, key_of
from pipemesh.schedule import Action

# With more values of a channel on their way than this, they lie in a list. A list is always read
# after all that has been put into it, so whoever reads it waits for what came later as well.
MAX_REGISTERS = 4
# What becomes of a register at a tick.
KEEPS, TAKES, CLEARS = 0, 1, 2
NOTHING = -1
Column = list[int]


class Shelf(NamedTuple):
    """The one list of all values of a dtype that stay on a device of a home.

    Each loop variable is several operations a tick, and each list that an action may change another
    one. As a home's actions are performed in turn, none waits for another because of a list that
    they share.
    """

    home: int
    place: int
    dtype: Any


class Access(NamedTuple):
    """That an action takes something from a shelf, or puts it there.

    Attributes:
        shelf: which one.
        number: how many the action has of this shelf before.
    """

    shelf: Shelf
    number: int


# Of each tensor of a value the shelf that it lies on; None where there is no tensor.
Shelves = Callable[[Key], Sequence[Shelf | None]]
Accesses = Mapping[Key, Sequence[Access | None]]


@dataclasses.dataclass
class HomeProgram:
    """What one home does, tick by tick.

    Attributes:
        roles: the kinds of actions that it has.
        accesses: of each of them, what it takes from shelves and puts there.
        code: at each tick the number of one of them, `NOTHING` where it idles.
        microbatch: of the action.
        slots: for each shelf, where each access of the action at a tick finds its value.
        indices: for each other list, where in it the action at a tick puts a value, or takes one.
        registers: for each channel that arrives here, what its registers do at each tick; none
            where it lies in a list.
        reads: for those channels, the number of the register that is read at each tick.
        arrivals: for channels that arrive and lie in a list, where a value is put at each tick.
    """

    roles: list[Role]
    accesses: list[Accesses]
    code: Column
    microbatch: Column
    slots: dict[Shelf, list[Column]]
    indices: dict[Key, Column]
    registers: dict[Channel, list[Column]]
    reads: dict[Channel, Column]
    arrivals: dict[Channel, Column]


# The shelves of a value's tensors, and by microbatch their slots.
_Move = tuple[Sequence[Shelf], dict[int, list[int]]]


class Places:
    """Where in lists values lie that stay on one home.

    Args:
        order: all actions of a run, in order.
        roles: of these.
        num_microbatches: how many there are.
        shelves: on which one each tensor of a value lies.

    Attributes:
        sizes: of each list, how many values it holds at most at once.
    """

    def __init__(
        self, order: Sequence[Action], roles: Roles, num_microbatches: int, shelves: Shelves
    ) -> None:
        self.sizes: dict[Key | Shelf, int] = {}
        self._roles = roles
        self._shelves = shelves
        self._found: dict[Key, Sequence[Shelf | None]] = {}
        self._free: dict[Shelf, list[int]] = {}
        self._slots: dict[Key, dict[int, list[int]]] = {}
        # Looked up once for each kind of action, since there are many actions.
        moves: dict[Role, tuple[list[_Move], list[_Move]]] = {}
        for action in order:
            role, m = roles.of(action), action.microbatch
            if role not in moves:
                moves[role] = self._moves(role.takes), self._moves(role.puts)
                for key in role.puts:
                    if not self.is_shelved(key):
                        # All of them are joined at the end.
                        self.sizes[key] = num_microbatches
            takes, puts = moves[role]
            for shelves_of, slots in takes:
                for shelf, slot in zip(shelves_of, slots[m], strict=True):
                    heapq.heappush(self._free[shelf], slot)
            for shelves_of, slots in puts:
                slots[m] = [self._slot(shelf) for shelf in shelves_of]

    def is_shelved(self, key: Key) -> bool:
        """Whether a value lies on shelves: if an action takes it."""
        return not self._roles.leaves(Channel(key.kind, key.stage))

    def of(self, key: Key) -> Mapping[int, Sequence[int]]:
        """By microbatch the slots of the tensors of a value that lies on shelves."""
        return self._slots[key]

    def accesses(self, role: Role) -> dict[Key, list[Access | None]]:
        """What an action takes from shelves, and puts there."""
        counts: dict[Shelf, int] = {}
        found: dict[Key, list[Access | None]] = {}
        for key in filter(self.is_shelved, (*role.takes, *role.puts)):
            found[key] = []
            for shelf in self._of(key):
                if shelf is None:
                    found[key].append(None)
                    continue
                found[key].append(Access(shelf, counts.get(shelf, 0)))
                counts[shelf] = counts.get(shelf, 0) + 1
        return found

    def _of(self, key: Key) -> Sequence[Shelf | None]:
        if key not in self._found:
            self._found[key] = self._shelves(key)
        return self._found[key]

    def _moves(self, keys: Sequence[Key]) -> list[_Move]:
        return [
            (
                [shelf for shelf in self._of(key) if shelf is not None],
                self._slots.setdefault(key, {}),
            )
            for key in keys
            if self.is_shelved(key)
        ]

    def _slot(self, shelf: Shelf) -> int:
        free = self._free.setdefault(shelf, [])
        if free:
            return heapq.heappop(free)
        self.sizes[shelf] = self.sizes.get(shelf, 0) + 1
        return self.sizes[shelf] - 1


def ticks_of(items: Sequence[Action], roles: Roles, stage_devices: Sequence[int]) -> list[int]:
    """For each action its tick: the first one after what its home did and what it hears."""
    free = [0] * (max(stage_devices) + 1)
    told: dict[Channel, dict[int, int]] = {}
    ways: dict[Role, tuple[list[dict[int, int]], list[dict[int, int]]]] = {}
    ticks: list[int] = []
    for action in items:
        home, role, m = stage_devices[action.stage], roles.of(action), action.microbatch
        if role not in ways:
            ways[role] = (
                [told.setdefault(channel, {}) for channel in role.hears],
                [told.setdefault(channel, {}) for channel in role.tells],
            )
        hears, tells = ways[role]
        tick = max([free[home], *(of[m] + 1 for of in hears)])
        for of in tells:
            of[m] = tick
        free[home] = tick + 1
        ticks.append(tick)
    return ticks


def program(
    items: Sequence[Action], stage_devices: Sequence[int], roles: Roles, places: Places
) -> tuple[dict[int, HomeProgram], int]:
    """What each home does, and the number of ticks.

    Args:
        items: actions, each after those that it needs.
        stage_devices: for each stage the number of its home.
        roles: of the actions.
        places: where values lie that stay on one home.
    """
    ticks = ticks_of(items, roles, stage_devices)
    count = max(ticks) + 1
    homes: dict[int, HomeProgram] = {}
    told: dict[Channel, dict[int, int]] = {}
    ways: dict[Channel, list[tuple[int, int]]] = {}
    kinds: dict[Role, _Kind] = {}
    for action, tick in zip(items, ticks, strict=True):
        home, role, m = stage_devices[action.stage], roles.of(action), action.microbatch
        if role not in kinds:
            own = homes.setdefault(home, _idle(count))
            kinds[role] = _kind(own, role, places, told, ways)
        kind = kinds[role]
        kind.own.code[tick], kind.own.microbatch[tick] = kind.number, m
        for slots, columns in kind.slots:
            for column, slot in zip(columns, slots[m], strict=True):
                column[tick] = slot
        for column in kind.listed:
            column[tick] = m
        for sent, spans in kind.hears:
            spans.append((sent[m], tick))
        for sent in kind.tells:
            sent[m] = tick
    for channel, spans in ways.items():
        home = homes[stage_devices[roles.user(channel)]]
        places.sizes[key_of(channel)] = _arrive(home, channel, sorted(spans), count)
    return homes, count


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Where the numbers of actions of a kind belong.

    Attributes:
        own: the program of its home.
        number: its number there.
        slots: of each value on shelves the slots by microbatch, and their columns.
        listed: the columns of what it puts into other lists.
        hears: of each channel the ticks at which it was sent, and when from and until it waits.
        tells: of each channel the ticks at which it is sent.
    """

    own: HomeProgram
    number: int
    slots: list[tuple[Mapping[int, Sequence[int]], list[Column]]]
    listed: list[Column]
    hears: list[tuple[dict[int, int], list[tuple[int, int]]]]
    tells: list[dict[int, int]]


def _kind(
    own: HomeProgram,
    role: Role,
    places: Places,
    told: dict[Channel, dict[int, int]],
    ways: dict[Channel, list[tuple[int, int]]],
) -> _Kind:
    """Adds a kind of action to its home."""
    count, accesses = len(own.code), places.accesses(role)
    own.roles.append(role)
    own.accesses.append(accesses)

    def column(access: Access) -> Column:
        columns = own.slots.setdefault(access.shelf, [])
        while len(columns) <= access.number:
            columns.append([0] * count)
        return columns[access.number]

    return _Kind(
        own,
        len(own.roles) - 1,
        [
            (places.of(key), [column(access) for access in found if access is not None])
            for key, found in accesses.items()
        ],
        [
            own.indices.setdefault(key, [0] * count)
            for key in role.puts
            if not places.is_shelved(key)
        ],
        [(told.setdefault(channel, {}), ways.setdefault(channel, [])) for channel in role.hears],
        [told.setdefault(channel, {}) for channel in role.tells],
    )


def _idle(count: int) -> HomeProgram:
    return HomeProgram([], [], [NOTHING] * count, [0] * count, {}, {}, {}, {}, {})


def _arrive(
    home: HomeProgram, channel: Channel, spans: Sequence[tuple[int, int]], count: int
) -> int:
    """Says where values lie that arrive at the end of one tick and are used at another.

    Returns:
        How many there are at most at once.
    """
    until: list[int] = []
    chosen: list[int] = []
    for begin, end in spans:
        place = next((p for p, busy in enumerate(until) if busy <= begin), len(until))
        until[place:] = [end, *until[place + 1 :]]
        chosen.append(place)
    if len(until) > MAX_REGISTERS:
        put, take = [NOTHING] * count, [0] * count
        for (begin, end), place in zip(spans, chosen, strict=True):
            put[begin], take[end] = place, place
        home.arrivals[channel], home.indices[key_of(channel)] = put, take
        return len(until)
    registers = [[CLEARS] * count for _ in until]
    reads = [NOTHING] * count
    for (begin, end), place in zip(spans, chosen, strict=True):
        registers[place][begin] = TAKES
        registers[place][begin + 1 : end] = [KEEPS] * (end - begin - 1)
        reads[end] = place
    home.registers[channel], home.reads[channel] = registers, reads
    return len(until)
