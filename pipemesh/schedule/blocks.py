"""Schedules that repeat a block: the way of one microbatch, tightened at both ends.

The way of a microbatch has `2 S` steps: the forwards of the `S` stages, then the input gradients
in the reverse order. A block says at which tick each step of the first microbatch is done;
microbatch `m` does all of it `m` periods later. The offsets are such that no two steps on a
device ever meet, and weight gradients go into the ticks that are left over. How long a block's
activations live decides how much a device holds. Idle time before and after the steady state is
then filled without holding more.

`even_blocks` finds blocks for a loop or a V. The way goes over the devices in legs: on a V down,
up, and the gradient down and up again. A block is even if each leg takes the same number of ticks
from device to device. All even blocks with short steps and turns are tried, and those kept in which
no two steps of a device meet, however often the block is repeated.

After Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product

from pipemesh.schedule.action import Action
from pipemesh.schedule.schedule import Schedule

# Ticks from device to device within a leg, and from one leg to the next.
_STEPS = range(1, 5)
# A way with more legs has too many blocks to try.
_MOST_LEGS = 4
# How much longer than its work a period may be, where little can be held.
_MOST_PERIODS = 4
_Step = tuple[int, int]
"""A place on the way and a microbatch; or `_WEIGHT` and how many weight gradients came before."""

_WEIGHT = -1


def repeated(
    placement: Sequence[int],
    offsets: Sequence[int],
    period: int,
    num_microbatches: int,
    limits: Sequence[int],
) -> list[Schedule]:
    """Returns the schedules that come from a block, by three ways to fill the ends."""
    # `offsets` are the ticks at which the first microbatch does its `2 S` steps; on a device they
    # differ by `period`. `limits` are pairs that a device may hold; a way that would hold more is
    # left out.
    devices = (*placement, *reversed(placement))
    plain: list[dict[_Step, int]] = [{} for _ in limits]
    for (place, device), m in itertools.product(enumerate(devices), range(num_microbatches)):
        plain[device][place, m] = offsets[place] + period * m
    pulled = _pulled(plain, devices, limits)
    schedules: list[Schedule] = []
    for draft, punctual in ((pulled, True), (pulled, False), (plain, False)):
        rows = _Walk(draft, placement, num_microbatches, limits, punctual).rows()
        if rows is not None:
            schedules.append(Schedule(tuple(map(tuple, rows)), tuple(placement), num_microbatches))
    return schedules


def _pulled(
    plain: list[dict[_Step, int]], devices: Sequence[int], limits: Sequence[int]
) -> list[dict[_Step, int]]:
    """Moves everything before the first gradient of stage 0 as early as memory permits."""
    boards = [
        _Board(times, len(devices) // 2, limit) for times, limit in zip(plain, limits, strict=True)
    ]
    order = sorted(
        (tick, device, step)
        for device, board in enumerate(boards)
        for step, tick in board.times.items()
    )
    for _, device, (place, number) in order:
        if (place, number) == (len(devices) - 1, 0):
            break
        ready = 0
        if number:
            ready = boards[device].times[place, number - 1] + 1
        if place > 0:
            ready = max(ready, boards[devices[place - 1]].times[place - 1, number] + 1)
        boards[device].pull((place, number), ready)
    return [
        {step: tick for step, tick in board.times.items() if step[0] != _WEIGHT} for board in boards
    ]


class _Board:
    """One device's ticks, weight gradients included: the step at each, and how much is held."""

    def __init__(self, times: dict[_Step, int], num_stages: int, limit: int) -> None:
        self.times = dict(times)
        self._num_stages = num_stages
        self._limit = limit
        self._taken = set(times.values())
        free = 0
        for number, tick in enumerate(self._gradients()):
            free = max(free, tick + 1)
            while free in self._taken:
                free += 1
            self._taken.add(free)
            self.times[_WEIGHT, number] = free
        changes = [0] * (free + 2)
        for (place, _), tick in self.times.items():
            if place == _WEIGHT:
                changes[tick + 1] -= 1
            elif place < num_stages:
                changes[tick] += 1
        self._held = list(itertools.accumulate(changes))

    def _gradients(self) -> list[int]:
        return sorted(t for (place, _), t in self.times.items() if place >= self._num_stages)

    def pull(self, step: _Step, ready: int) -> None:
        """Moves a step to the first free tick from `ready` on at which there is room for it."""
        place, number = step
        tick = self.times[step]
        is_forward = _WEIGHT < place < self._num_stages
        if place == _WEIGHT:
            ready = max(ready, self._gradients()[number] + 1)
        elif is_forward:
            full = (t for t in range(tick - 1, ready - 1, -1) if self._held[t] >= self._limit)
            ready = next(full, ready - 1) + 1
        earlier = next((t for t in range(ready, tick) if t not in self._taken), tick)
        self._taken.remove(tick)
        self._taken.add(earlier)
        self.times[step] = earlier
        if is_forward:
            self._change(earlier, tick, 1)
        elif place == _WEIGHT:
            self._change(earlier + 1, tick + 1, -1)

    def _change(self, begin: int, end: int, change: int) -> None:
        for tick in range(begin, end):
            self._held[tick] += change


class _Walk:
    """Devices that act tick by tick, each in the order of a draft as far as it can.

    Until the last microbatch has entered, a device waits for the next step of its draft, if it is
    punctual also until the draft's tick; after that it takes the step that is ready first. A
    weight gradient is done where nothing else is.
    """

    def __init__(
        self,
        draft: list[dict[_Step, int]],
        placement: Sequence[int],
        num_microbatches: int,
        limits: Sequence[int],
        punctual: bool,
    ) -> None:
        self._num_stages = len(placement)
        self._num_microbatches = num_microbatches
        self._limits = limits
        self._punctual = punctual
        self._todo = [
            [(tick, *step) for step, tick in sorted(times.items(), key=lambda item: item[1])]
            for times in draft
        ]
        # The device's stages up to and including each stage, and the room that later ones need.
        stages_of = [
            [s for s, home in enumerate(placement) if home == d] for d in range(len(draft))
        ]
        self._up_to = [stages_of[d][: stages_of[d].index(s) + 1] for s, d in enumerate(placement)]
        self._later = [
            len(stages_of[d]) - len(up) for d, up in zip(placement, self._up_to, strict=True)
        ]
        # How often each step of the way has been done; microbatches come in order.
        self._done = [0] * (2 * self._num_stages)
        self._held = [0] * len(draft)
        self._owed: list[deque[Action]] = [deque() for _ in draft]
        self._rows: list[list[Action]] = [[] for _ in draft]

    def rows(self) -> list[list[Action]] | None:
        """Returns for each device its actions; None if full devices wait for each other."""
        latest = max(todo[-1][0] for todo in self._todo)
        for tick in itertools.count():
            if not any(self._todo) and not any(self._owed):
                return self._rows
            entered = self._done[0] == self._num_microbatches
            choices = [self._choose(d, tick, entered) for d in range(len(self._todo))]
            if tick > latest and not any(self._owed) and all(c is None for c in choices):
                return None
            for device, choice in enumerate(choices):
                self._act(device, choice)
        return None

    def _choose(self, device: int, tick: int, entered: bool) -> int | None:
        """Returns the index of the next step among those that a device has still to do."""
        todo = self._todo[device]
        for index in range(len(todo) if entered else min(1, len(todo))):
            due, place, microbatch = todo[index]
            early = due > tick and self._punctual and not entered
            if not early and self._is_ready(device, place, microbatch):
                return index
        return None

    def _is_ready(self, device: int, place: int, microbatch: int) -> bool:
        done = self._done
        if done[place] != microbatch or (place and done[place - 1] <= microbatch):
            return False
        if place >= self._num_stages:
            return True
        limit = self._limits[device]
        if self._held[device] >= limit:
            return False
        # A device full of its early stages could take nothing that comes to a later one.
        last = 2 * self._num_stages - 1
        on_the_way = sum(done[s] - done[last - s] for s in self._up_to[place])
        return not self._later[place] or on_the_way < limit - self._later[place]

    def _act(self, device: int, choice: int | None) -> None:
        row, owed = self._rows[device], self._owed[device]
        if choice is None:
            if owed:
                row.append(owed.popleft())
                self._held[device] -= 1
            return
        _, place, microbatch = self._todo[device].pop(choice)
        self._done[place] += 1
        if place < self._num_stages:
            row.append(Action(place, "F", microbatch))
            self._held[device] += 1
        else:
            stage = 2 * self._num_stages - 1 - place
            row.append(Action(stage, "I", microbatch))
            owed.append(Action(stage, "W", microbatch))


def even_blocks(
    placement: Sequence[int], num_devices: int, limits: Sequence[int], most: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the periods and offsets of the `most` even blocks that hold most within `limits`."""
    # Those that hold most wait least. There are none if the placement is neither a loop nor a V, or
    # has more than two stages a device.
    devices = (*placement, *reversed(placement))
    legs = [devices[i : i + num_devices] for i in range(0, len(devices), num_devices)]
    if len(legs) > _MOST_LEGS or any(sorted(leg) != list(range(num_devices)) for leg in legs):
        return []
    shortest = 3 * len(legs) // 2
    for period in range(shortest, shortest * _MOST_PERIODS):
        fitting = (
            (-held, offsets)
            for offsets in _offsets(legs, period)
            if (held := _held(offsets, devices, period, limits)) <= 1
        )
        blocks = heapq.nsmallest(most, fitting)
        if blocks:
            return [(period, offsets) for _, offsets in blocks]
    return []


def _offsets(
    legs: Sequence[Sequence[int]],
    period: int,
    before: tuple[int, ...] = (),
    taken: int = 0,
) -> Iterator[tuple[int, ...]]:
    """Yields the offsets of the blocks in which no two steps of a device meet, leg by leg."""
    if not legs:
        yield before
        return
    devices, *later = legs
    # A leg of one device has no steps within.
    steps = _STEPS if len(devices) > 1 else _STEPS[:1]
    for step, turn in product(steps, _STEPS if before else (0,)):
        begin = before[-1] + turn if before else 0
        leg = range(begin, begin + step * len(devices), step)
        # A bit for each tick of a device, modulo the period.
        slots = sum(
            1 << device * period + t % period for device, t in zip(devices, leg, strict=True)
        )
        if not slots & taken:
            yield from _offsets(later, period, (*before, *leg), taken | slots)


def _held(
    offsets: Sequence[int], devices: Sequence[int], period: int, limits: Sequence[int]
) -> float:
    """Returns about which share of its limit the fullest device holds in the steady state."""
    ticks = [0.0] * len(limits)
    half = len(devices) // 2
    for stage in range(half):
        # To the end of a weight gradient right after the input gradient.
        ticks[devices[stage]] += offsets[2 * half - 1 - stage] + 2 - offsets[stage]
    return max(t / (period * limit) for t, limit in zip(ticks, limits, strict=True))
