"""V-Min and V-Half: a block that repeats every six ticks on a V, tightened at both ends.

A block says at which tick each device does the forward and the input gradient of its two stages
for the first microbatch; for microbatch `m` all happens `6 m` ticks later. The offsets are such
that no two actions of a device ever meet, and weight gradients go into the two ticks of six that
are left over. How long a block's activations live decides what a device holds. What is idle before
and after the steady state is then filled without holding more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from pipemesh.schedule.action import Action
from pipemesh.schedule.counts import check_counts
from pipemesh.schedule.placement import vee
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.validate import validate

# Two stages a device, each with a forward, an input gradient and a weight gradient.
_PERIOD = 6
_FORWARD_DOWN, _FORWARD_UP, _GRAD_UP, _GRAD_DOWN, _WEIGHT = range(5)

_Step = tuple[int, int]
"""One of the five above and a microbatch (of `_WEIGHT` a number in turn): what a device does."""

_Block = tuple[int, int, int, int]
"""For each of the four the tick at which a device does it for the first microbatch."""


def v_min(num_devices: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's memory: no device holds more than `(D + 4) // 3` microbatches' activations.

    That is `2 ((D + 4) // 3)` (stage, microbatch) pairs; two stages are a device's share of the
    model. Made for `f = i = w`: then, for `D > 2` and `M >= D`, the bubble is `(4 D - 7) f` if 3
    divides `D`, else `(4 D - 5) f`. Where the durations differ, devices wait for each other in
    every round.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, V-Min; offsets of the
    block from the authors' scheduler. How its ends are filled is this package's own.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(v_min(2, 2))
        0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    # Without a gap, forwards and input gradients would meet if 3 divides D.
    gap = 0 if num_devices % 3 else 2
    blocks = [
        (d, 2 * num_devices - 1 - d, 2 * num_devices + gap + d, 4 * num_devices + gap - 1 - d)
        for d in range(num_devices)
    ]
    return _repeat(blocks, num_microbatches, 2 * ((num_devices + 4) // 3))


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """Half of 1F1B's memory: no device holds more than `D // 2 + 1` microbatches' activations.

    That is `2 (D // 2 + 1)` (stage, microbatch) pairs; two stages are a device's share of the
    model. With `f = i = w`, the case the table is made for, `D > 2` and `M >= D + 2`, the bubble is
    `(3 D - 7) f` if 2 divides `D`, else `(3 D - 4) f`.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, V-Half; offsets of the
    block from the authors' scheduler. How its ends are filled is this package's own.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> print(v_half(2, 2))
        0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    # Without a gap, forwards and input gradients would meet if 2 divides D.
    gap = 0 if num_devices % 2 else 3
    blocks = [
        (
            2 * d,
            3 * num_devices - 2 - d,
            3 * num_devices + gap - 1 + 2 * d,
            6 * num_devices + gap - 2 - d,
        )
        for d in range(num_devices)
    ]
    return _repeat(blocks, num_microbatches, 2 * (num_devices // 2 + 1))


def _repeat(blocks: list[_Block], num_microbatches: int, limit: int) -> Schedule:
    """The shortest of three ways to fill the ends; which one that is depends on `M` and `D`."""
    plain = [
        {(k, m): block[k] + _PERIOD * m for k in range(4) for m in range(num_microbatches)}
        for block in blocks
    ]
    pulled = _pulled(plain, limit)
    found: list[Schedule] = []
    for draft, punctual in ((pulled, True), (pulled, False), (plain, False)):
        rows = _Walk(draft, num_microbatches, limit, punctual).rows()
        if rows is not None:
            found.append(Schedule(tuple(map(tuple, rows)), vee(len(blocks)), num_microbatches))
    return validate(min(found, key=lambda schedule: simulate(schedule).makespan))


def _sources(device: int, step: _Step, num_devices: int) -> list[tuple[int, _Step]]:
    """What a device's step waits for, but for the gradient that a weight gradient belongs to."""
    kind, number = step
    before = device - 1 if kind in (_FORWARD_DOWN, _GRAD_UP) else device + 1
    found = [(device, (kind, number - 1))] if number else []
    if kind != _WEIGHT:
        if 0 <= before < num_devices:
            found.append((before, step))
        if kind:
            found.append((device, (kind - 1, number)))
    return found


def _pulled(plain: list[dict[_Step, int]], limit: int) -> list[dict[_Step, int]]:
    """Everything before the first microbatch is back at its start, as early as memory permits."""
    boards = [_Board(times, limit) for times in plain]
    order = sorted(
        (tick, device, step) for device, board in enumerate(boards) for step, tick in board.steps()
    )
    for _, device, step in order:
        if (device, step) == (0, (_GRAD_DOWN, 0)):
            break
        sources = _sources(device, step, len(plain))
        boards[device].pull(step, 1 + max((boards[d].times[s] for d, s in sources), default=-1))
    return [board.without_weights() for board in boards]


class _Board:
    """One device's ticks, weight gradients included: where what is, and how much is held."""

    def __init__(self, times: dict[_Step, int], limit: int) -> None:
        self.times = dict(times)
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
        for (kind, _), tick in self.times.items():
            if kind < _GRAD_UP:
                changes[tick] += 1
            elif kind == _WEIGHT:
                changes[tick + 1] -= 1
        self._held = list(itertools.accumulate(changes))

    def _gradients(self) -> list[int]:
        return sorted(t for (kind, _), t in self.times.items() if kind in (_GRAD_UP, _GRAD_DOWN))

    def steps(self) -> Iterable[tuple[_Step, int]]:
        return self.times.items()

    def without_weights(self) -> dict[_Step, int]:
        return {step: tick for step, tick in self.times.items() if step[0] != _WEIGHT}

    def pull(self, step: _Step, ready: int) -> None:
        """Moves a step to the first free tick from `ready` on at which there is room for it."""
        kind, number = step
        tick = self.times[step]
        if kind == _WEIGHT:
            ready = max(ready, self._gradients()[number] + 1)
        if kind < _GRAD_UP:
            full = (t for t in range(tick - 1, ready - 1, -1) if self._held[t] >= self._limit)
            ready = next(full, ready - 1) + 1
        earlier = next((t for t in range(ready, tick) if t not in self._taken), tick)
        self._taken.remove(tick)
        self._taken.add(earlier)
        self.times[step] = earlier
        if kind < _GRAD_UP:
            self._change(earlier, tick, 1)
        elif kind == _WEIGHT:
            self._change(earlier + 1, tick + 1, -1)

    def _change(self, begin: int, end: int, change: int) -> None:
        for tick in range(begin, end):
            self._held[tick] += change


class _Walk:
    """Lets the devices act tick by tick, each in the order of a draft as far as it can.

    Until the last microbatch has entered, a device waits for the next step of its draft, if it is
    punctual also until the draft's tick; after that it takes whichever step is ready first. A
    weight gradient is done where nothing else is.
    """

    def __init__(
        self, draft: list[dict[_Step, int]], num_microbatches: int, limit: int, punctual: bool
    ) -> None:
        self._num_microbatches = num_microbatches
        self._limit = limit
        self._punctual = punctual
        self._todo = [
            [(tick, *step) for step, tick in sorted(times.items(), key=lambda item: item[1])]
            for times in draft
        ]
        # How often each device has done each of the four; microbatches come in order.
        self._done = [[0] * 4 for _ in draft]
        self._held = [0] * len(draft)
        self._owed: list[deque[Action]] = [deque() for _ in draft]
        self._rows: list[list[Action]] = [[] for _ in draft]

    def rows(self) -> list[list[Action]] | None:
        """For each device its actions; None if devices that are full wait for each other."""
        latest = max(todo[-1][0] for todo in self._todo)
        for tick in itertools.count():
            if not any(self._todo) and not any(self._owed):
                return self._rows
            entered = self._done[0][_FORWARD_DOWN] == self._num_microbatches
            choices = [self._choose(d, tick, entered) for d in range(len(self._todo))]
            if tick > latest and not any(self._owed) and all(c is None for c in choices):
                return None
            for device, choice in enumerate(choices):
                self._act(device, choice)
        return None

    def _choose(self, device: int, tick: int, entered: bool) -> int | None:
        """Which of the steps that a device has still to do is next."""
        todo = self._todo[device]
        for index in range(len(todo) if entered else min(1, len(todo))):
            due, kind, microbatch = todo[index]
            early = due > tick and self._punctual and not entered
            if not early and self._is_ready(device, kind, microbatch):
                return index
        return None

    def _is_ready(self, device: int, kind: int, microbatch: int) -> bool:
        done, own = self._done, self._done[device]
        if kind < _GRAD_UP and self._held[device] >= self._limit:
            return False
        # A device full of what is on its way down could take nothing that comes back up.
        if kind == _FORWARD_DOWN and own[_FORWARD_DOWN] - own[_GRAD_DOWN] >= self._limit - 1:
            return False
        before = device - 1 if kind in (_FORWARD_DOWN, _GRAD_UP) else device + 1
        return (
            own[kind] == microbatch
            and (kind == _FORWARD_DOWN or own[kind - 1] > microbatch)
            and (not 0 <= before < len(done) or done[before][kind] > microbatch)
        )

    def _act(self, device: int, choice: int | None) -> None:
        row, owed = self._rows[device], self._owed[device]
        if choice is None:
            if owed:
                row.append(owed.popleft())
                self._held[device] -= 1
            return
        _, kind, microbatch = self._todo[device].pop(choice)
        is_up = kind in (_FORWARD_UP, _GRAD_UP)
        stage = 2 * len(self._todo) - 1 - device if is_up else device
        self._done[device][kind] += 1
        if kind < _GRAD_UP:
            row.append(Action(stage, "F", microbatch))
            self._held[device] += 1
        else:
            row.append(Action(stage, "I", microbatch))
            owed.append(Action(stage, "W", microbatch))
