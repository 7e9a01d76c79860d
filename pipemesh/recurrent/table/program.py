"""A table as data: what each home does at each tick, and where it finds what others made."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pipemesh.recurrent.remat import Mode
from pipemesh.recurrent.table.kinds import GRADS, KEPT, OUTPUTS, PENDING, Channel
from pipemesh.schedule import Action

# With more values of a channel on their way than this, they lie in a list.
MAX_REGISTERS = 4
# What becomes of a register at a tick.
KEEPS, TAKES, CLEARS = 0, 1, 2
NOTHING = -1


class Code(NamedTuple):
    """A kind of action of a home; which microbatch it is for is data."""

    kind: str
    stage: int
    mode: Mode


class Spot(NamedTuple):
    """A kind of value that lies in a list, at its home; what is kept depends on the mode."""

    channel: Channel
    mode: Mode | None


@dataclasses.dataclass
class HomeProgram:
    """What one home does, tick by tick.

    Attributes:
        codes: the kinds of actions that it has.
        code: at each tick the number of one of them, `NOTHING` where it idles.
        microbatch: of the action.
        indices: for each list, where in it the action at a tick puts a value, or takes one.
        registers: for each channel that arrives here, what its registers do at each tick; none
            where it lies in a list.
        reads: for those channels, the number of the register that is read at each tick.
        arrivals: for channels that arrive and lie in a list, where a value is put at each tick.
    """

    codes: list[Code]
    code: list[int]
    microbatch: list[int]
    indices: dict[Spot, list[int]]
    registers: dict[Channel, list[list[int]]]
    reads: dict[Channel, list[int]]
    arrivals: dict[Channel, list[int]]


class Memory:
    """Where values lie that stay on one home, by their microbatch.

    Args:
        order: all actions of a run, in order.
        stage_devices: for each stage the number of its home.
        mode_of: of remat, for each stage and microbatch.
        num_microbatches: how many there are.

    Attributes:
        sizes: of each list, how many values it holds at most at once.
    """

    def __init__(
        self,
        order: Sequence[Action],
        stage_devices: Sequence[int],
        mode_of: Mapping[tuple[int, int], Mode],
        num_microbatches: int,
    ) -> None:
        self._homes = stage_devices
        self._mode_of = mode_of
        self.num_stages = len(stage_devices)
        self.sizes: dict[Spot, int] = {}
        self._indices: dict[tuple[Spot, int], int] = {}
        taken = {(spot, a.microbatch) for a in order for spot in self.takes(a)}
        free: dict[Spot, list[int]] = {}
        for action in order:
            for spot in self.takes(action):
                heapq.heappush(free[spot], self._indices[spot, action.microbatch])
            for spot in self.puts(action):
                if self.leaves(spot.channel):
                    self.sizes[spot] = num_microbatches
                    self._indices[spot, action.microbatch] = action.microbatch
                elif (spot, action.microbatch) in taken:
                    unused = free.setdefault(spot, [])
                    if not unused:
                        unused.append(self.sizes.get(spot, 0))
                        self.sizes[spot] = unused[0] + 1
                    self._indices[spot, action.microbatch] = heapq.heappop(unused)

    def leaves(self, channel: Channel) -> bool:
        """Whether it comes out of the pipeline, where no action takes it."""
        return channel in (Channel(OUTPUTS, self.num_stages - 1), Channel(GRADS, 0))

    def takes(self, action: Action) -> list[Spot]:
        """The lists that an action takes a value from."""
        return [
            spot
            for channel in taken(action, self.num_stages)
            if (spot := self._local(channel, action)) is not None
        ]

    def puts(self, action: Action) -> list[Spot]:
        """The lists that it puts one into, if somebody takes it."""
        return [
            spot for channel in given(action) if (spot := self._local(channel, action)) is not None
        ]

    def indices(self, action: Action) -> dict[Spot, int]:
        """Where in lists an action finds or leaves something."""
        spots = [*self.takes(action), *self.puts(action)]
        return {
            spot: self._indices[spot, action.microbatch]
            for spot in spots
            if (spot, action.microbatch) in self._indices
        }

    def _local(self, channel: Channel, action: Action) -> Spot | None:
        if channel.kind.by_mode:
            return Spot(channel, self._mode_of[action.stage, action.microbatch])
        if self.leaves(channel) or not crosses(channel, self._homes):
            return Spot(channel, None)
        return None


def given(action: Action) -> list[Channel]:
    """What an action makes."""
    stage = action.stage
    if action.kind == "F":
        return [Channel(OUTPUTS, stage), Channel(KEPT, stage)]
    if action.kind == "W":
        return []
    pending = [Channel(PENDING, stage)] if action.kind == "I" else []
    return [Channel(GRADS, stage), *pending]


def taken(action: Action, num_stages: int) -> list[Channel]:
    """What an action uses that other actions make."""
    stage = action.stage
    if action.kind == "F":
        return [Channel(OUTPUTS, stage - 1)] if stage else []
    if action.kind == "W":
        return [Channel(PENDING, stage)]
    above = [Channel(GRADS, stage + 1)] if stage + 1 < num_stages else []
    return [Channel(KEPT, stage), *above]


def user(channel: Channel) -> int:
    """The stage that takes what the stage of a channel hands to another one."""
    return channel.stage + (1 if channel.kind == OUTPUTS else -1)


def crosses(channel: Channel, stage_devices: Sequence[int]) -> bool:
    """Whether it goes from one home to another."""
    if channel.kind not in (OUTPUTS, GRADS):
        return False
    return stage_devices[channel.stage] != stage_devices[user(channel)]


def ticks_of(
    items: Sequence[Action], stage_devices: Sequence[int], crossing: Callable[[Channel], bool]
) -> list[int]:
    """For each action the tick it has: the first after what its home did and what it needs."""
    free: dict[int, int] = {}
    made: dict[tuple[Channel, int], int] = {}
    ticks = []
    for action in items:
        home = stage_devices[action.stage]
        needed = (
            made.get((channel, action.microbatch), -1)
            for channel in taken(action, len(stage_devices))
            if crossing(channel)
        )
        tick = max([free.get(home, 0), *(t + 1 for t in needed)])
        free[home] = tick + 1
        ticks.append(tick)
        for channel in given(action):
            made[channel, action.microbatch] = tick
    return ticks


def program(
    items: Sequence[Action],
    stage_devices: Sequence[int],
    mode_of: Mapping[tuple[int, int], Mode],
    memory: Memory,
) -> tuple[dict[int, HomeProgram], int]:
    """What each home does, and the number of ticks.

    Args:
        items: actions, each after those that it needs.
        stage_devices: for each stage the number of its home.
        mode_of: of remat, for each stage and microbatch.
        memory: where values lie that stay on one home.
    """
    num_stages = len(stage_devices)

    def crossing(channel: Channel) -> bool:
        return not memory.leaves(channel) and crosses(channel, stage_devices)

    ticks = ticks_of(items, stage_devices, crossing)
    count = max(ticks) + 1
    homes: dict[int, HomeProgram] = {}
    sent: dict[tuple[Channel, int], int] = {}
    ways: dict[Channel, list[tuple[int, int]]] = {}
    for action, tick in zip(items, ticks, strict=True):
        home = stage_devices[action.stage]
        own = homes.setdefault(home, _idle(count))
        code = Code(action.kind, action.stage, mode_of[action.stage, action.microbatch])
        if code not in own.codes:
            own.codes.append(code)
        own.code[tick] = own.codes.index(code)
        own.microbatch[tick] = action.microbatch
        for spot, index in memory.indices(action).items():
            own.indices.setdefault(spot, [0] * count)[tick] = index
        for channel in taken(action, num_stages):
            if crossing(channel):
                ways.setdefault(channel, []).append((sent[channel, action.microbatch], tick))
        for channel in given(action):
            sent[channel, action.microbatch] = tick
    for channel, spans in ways.items():
        held = _arrive(homes[stage_devices[user(channel)]], channel, spans, count)
        memory.sizes[Spot(channel, None)] = held
    return homes, count


def _idle(count: int) -> HomeProgram:
    return HomeProgram([], [NOTHING] * count, [0] * count, {}, {}, {}, {})


def _arrive(
    home: HomeProgram, channel: Channel, spans: Iterable[tuple[int, int]], count: int
) -> int:
    """Says where values lie that arrive at the end of one tick and are used at another.

    Returns:
        How many there are at most at once.
    """
    spans = sorted(spans)
    places: list[int] = []
    until: list[int] = []
    for begin, end in spans:
        place = next((p for p, busy in enumerate(until) if busy <= begin), len(until))
        if place == len(until):
            until.append(end)
        else:
            until[place] = end
        places.append(place)
    if len(until) > MAX_REGISTERS:
        put, take = [NOTHING] * count, [0] * count
        for (begin, end), place in zip(spans, places, strict=True):
            put[begin], take[end] = place, place
        home.arrivals[channel] = put
        home.indices[Spot(channel, None)] = take
        return len(until)
    registers = [[KEEPS] * count for _ in until]
    reads = [NOTHING] * count
    for (_, end), place in zip(spans, places, strict=True):
        registers[place][end] = CLEARS
        reads[end] = place
    for (begin, _), place in zip(spans, places, strict=True):
        registers[place][begin] = TAKES
    home.registers[channel] = registers
    home.reads[channel] = reads
    return len(until)


def as_table(columns: Sequence[Sequence[int]]) -> np.ndarray:
    """Columns as rows of integers, one a tick."""
    return np.asarray(columns, np.int32).T
