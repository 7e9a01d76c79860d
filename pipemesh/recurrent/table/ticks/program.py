"""A table as numbers: what each home does at each tick, and where it finds what others made."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from pipemesh.recurrent.table.kinds import Channel
from pipemesh.recurrent.table.lists import Key
from pipemesh.recurrent.table.ticks.codes import Code, Role, Roles, key_of
from pipemesh.schedule import Action

# With more values of a channel on their way than this, they lie in a list. A list is always read
# after all that has been put into it, so whoever reads it waits for what came later as well.
MAX_REGISTERS = 4
# What becomes of a register at a tick.
KEEPS, TAKES, CLEARS = 0, 1, 2
NOTHING = -1
Column = list[int]


@dataclasses.dataclass
class HomeProgram:
    """What one home does, tick by tick.

    Attributes:
        roles: the kinds of actions that it has.
        code: at each tick the number of one of them, `NOTHING` where it idles.
        microbatch: of the action.
        indices: for each list, where in it the action at a tick puts a value, or takes one.
        registers: for each channel that arrives here, what its registers do at each tick; none
            where it lies in a list.
        reads: for those channels, the number of the register that is read at each tick.
        arrivals: for channels that arrive and lie in a list, where a value is put at each tick.
    """

    roles: list[Role]
    code: Column
    microbatch: Column
    indices: dict[Key, Column]
    registers: dict[Channel, list[Column]]
    reads: dict[Channel, Column]
    arrivals: dict[Channel, Column]


class Places:
    """Where in lists values lie that stay on one home.

    Args:
        order: all actions of a run, in order.
        roles: of these.
        num_microbatches: how many there are.

    Attributes:
        sizes: of each list, how many values it holds at most at once.
    """

    def __init__(self, order: Sequence[Action], roles: Roles, num_microbatches: int) -> None:
        self.sizes: dict[Key, int] = {}
        self._indices: dict[Key, dict[int, int]] = {}
        free: dict[Key, list[int]] = {}
        for action in order:
            role, m = roles.of(action), action.microbatch
            for key in role.takes:
                heapq.heappush(free[key], self._indices[key][m])
            for key in role.puts:
                if roles.leaves(Channel(key.kind, key.stage)):
                    # All of them are joined at the end.
                    self.sizes[key] = num_microbatches
                    self._indices.setdefault(key, {})[m] = m
                    continue
                unused = free.setdefault(key, [])
                if not unused:
                    unused.append(self.sizes.get(key, 0))
                    self.sizes[key] = unused[0] + 1
                self._indices.setdefault(key, {})[m] = heapq.heappop(unused)

    def of(self, key: Key, microbatch: int) -> int:
        """The place of a microbatch's value."""
        return self._indices[key][microbatch]


def ticks_of(items: Sequence[Action], roles: Roles, stage_devices: Sequence[int]) -> list[int]:
    """For each action its tick: the first one after what its home did and what it hears."""
    free = [0] * (max(stage_devices) + 1)
    told: dict[Channel, dict[int, int]] = {}
    ticks = []
    for action in items:
        home, role = stage_devices[action.stage], roles.of(action)
        tick = free[home]
        for channel in role.hears:
            tick = max(tick, told[channel][action.microbatch] + 1)
        for channel in role.tells:
            told.setdefault(channel, {})[action.microbatch] = tick
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
    numbers: dict[Code, int] = {}
    told: dict[Channel, dict[int, int]] = {}
    ways: dict[Channel, list[tuple[int, int]]] = {}
    for action, tick in zip(items, ticks, strict=True):
        home, role, m = stage_devices[action.stage], roles.of(action), action.microbatch
        own = homes.get(home)
        if own is None:
            own = homes[home] = _idle(count)
        if role.code not in numbers:
            numbers[role.code] = len(own.roles)
            own.roles.append(role)
        own.code[tick], own.microbatch[tick] = numbers[role.code], m
        for key in (*role.takes, *role.puts):
            own.indices.setdefault(key, [0] * count)[tick] = places.of(key, m)
        for channel in role.hears:
            ways.setdefault(channel, []).append((told[channel][m], tick))
        for channel in role.tells:
            told.setdefault(channel, {})[m] = tick
    for channel, spans in ways.items():
        home = homes[stage_devices[roles.user(channel)]]
        places.sizes[key_of(channel)] = _arrive(home, channel, sorted(spans), count)
    return homes, count


def _idle(count: int) -> HomeProgram:
    return HomeProgram([], [NOTHING] * count, [0] * count, {}, {}, {}, {})


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
