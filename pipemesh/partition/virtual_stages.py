"""Exact cuts where devices own several stages that need not be neighbours.

A device costs the sum of its stages, so a program that goes along the layers would have to carry
the sums of all devices. This one goes device by device: a step cuts all stages of one device. A
state holds the places of the boundaries between stages that are done and stages that are not. With
V stages a device that go round, those are V walkers and the start of each; in a V, two walkers that
come from both ends. README.md has the complexity.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.errors import PartitionError
from pipemesh.partition.costs import Ints, expand, search
from pipemesh.partition.problem import Problem

MOST_STATES = 8_000_000
"""States that one search may create before it gives up with an error."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One stage of a device, in the order in which stages are cut."""

    stage: int
    knows_begin: bool
    knows_end: bool
    beyond: int  # The next known boundary on the side that is not known.
    between: tuple[int, ...]  # Devices of the stages up to there, each once.


@dataclasses.dataclass(frozen=True)
class Walk:
    """The turns of all stages, device by device: step d cuts the stages of device d."""

    # At least one end of each stage is known by then. Boundaries for which that would not hold are
    # placed before the first step.

    starts: tuple[int, ...]  # Ascending boundaries that are placed before the first step.
    turns: tuple[tuple[Turn, ...], ...]  # For each device its stages.
    # Each of these is for the state before each step and after the last one.
    open: tuple[tuple[int, ...], ...]  # Boundaries between a stage done and one not, and `starts`.
    closed: tuple[tuple[int, ...], ...]  # Boundaries that the last step placed between its stages.
    gaps: tuple[tuple[tuple[int, int], ...], ...]  # Begin and end of each run of stages not done.

    @classmethod
    @functools.cache
    def over(cls, stage_devices: tuple[int, ...]) -> Walk:
        """Returns the walk for the device of each stage."""
        starts: set[int] = set()
        while True:
            walk = _walk(stage_devices, sorted(starts))
            if isinstance(walk, Walk):
                return walk
            starts.add(walk)


def _walk(stage_devices: tuple[int, ...], starts: Sequence[int]) -> Walk | int:
    """Returns the walk, or a boundary that must be placed before it."""
    stages = len(stage_devices)
    known, done = {0, stages, *starts}, set[int]()
    turns: list[tuple[Turn, ...]] = []
    opens, closed = [tuple(starts)], [()]
    gaps = [tuple(_gaps(stages, done))]
    for device in range(max(stage_devices) + 1):
        device_turns: list[Turn] = []
        placed: set[int] = set()
        for stage in (stage for stage, owner in enumerate(stage_devices) if owner == device):
            begin, end = stage in known, stage + 1 in known
            if not begin and not end:
                return stage
            if end:
                beyond = max((b for b in known if b < stage), default=0)
                between = stage_devices[beyond:stage]
            else:
                beyond = min(b for b in known if b > stage)
                between = stage_devices[stage + 1 : beyond]
            device_turns.append(Turn(stage, begin, end, beyond, tuple(sorted(set(between)))))
            placed |= {stage, stage + 1} - known
            known |= placed
            done.add(stage)
        turns.append(tuple(device_turns))
        still = {b for b in known if 0 < b < stages and not {b - 1, b} <= done}
        opens.append(tuple(sorted(still)))
        closed.append(tuple(sorted(placed - still)))
        gaps.append(tuple(_gaps(stages, done)))
    return Walk(tuple(starts), tuple(turns), tuple(opens), tuple(closed), tuple(gaps))


def _gaps(stages: int, done: set[int]) -> Iterator[tuple[int, int]]:
    for is_done, run in itertools.groupby(range(stages), done.__contains__):
        if not is_done:
            first, *others = run
            yield first, first + len(others) + 1


@dataclasses.dataclass
class _States:
    """Columns of states: the places of boundaries, and the values so far."""

    places: Ints  # A row for each open boundary, then for each closed one; a column a state.
    values: list[Ints]  # Minimized, most important first.
    parents: Ints  # Indices into the states of the step before.

    def take(self, index: Ints) -> _States:
        """Returns the states at some indices."""
        return _States(
            self.places[:, index], [value[index] for value in self.values], self.parents[index]
        )


class _Search:
    """One pass over the devices under a bound on the device sums."""

    def __init__(
        self,
        problem: Problem,
        bottleneck: int,
        most_squares: int | None = None,
        most_states: int | None = None,
    ) -> None:
        self._most_states = most_states or MOST_STATES
        self._problem = problem
        self._bottleneck = bottleneck
        # With a bound on the squares of device sums they are minimized, else the largest sum.
        self._most_squares = most_squares
        self._created = 0
        self._devices = problem.num_devices
        self._walk = Walk.over(problem.stage_devices)
        self._first, self._last = problem.windows()
        # Loads that no device can beat, for the bound on what is left: as floats, and with a
        # margin, because they only ever rule states out.
        speeds = np.asarray(_device_speeds(problem))
        self._shift = _shift(problem)
        loads = problem.cheapest_loads(self._shift)
        self._loads = np.concatenate([[0.0], np.cumsum(loads)])
        speeds /= speeds.max()
        self._speeds = speeds * float((bottleneck >> self._shift) + 1)
        self._room = np.append(np.cumsum(self._speeds[::-1])[::-1], 0.0)
        self._weight = np.append(np.cumsum((speeds**2)[::-1])[::-1], 0.0)
        self._slack = 1e-9 * float(self._loads[-1])
        # The same for memory: each layer held as few times as any stage does.
        self._bytes: Ints | None = None
        self._limit = 0
        memory = problem.memory
        if memory is not None:
            assert memory.limit is not None
            self._bytes = memory.parameters + min(memory.activation_weight) * memory.activations
            self._limit = memory.limit
        self.too_much_memory = (
            self._bytes is not None and int(self._bytes[-1]) > self._limit * self._devices
        )

    def run(self) -> tuple[list[int], list[Any]] | None:
        """Steps over all devices; returns boundaries and values of the best cut, if any."""
        states = self._starts()
        history: list[_States] = [states]
        for device in range(self._devices):
            if not states.places.shape[1]:
                return None
            states = self._step(states, device)
            history.append(states)
        if not states.places.shape[1]:
            return None
        order = range(states.places.shape[1])
        best = min(order, key=lambda i: tuple(value[i] for value in states.values))
        values = [value[best] for value in states.values]
        boundaries = [0] * (self._problem.num_stages + 1)
        boundaries[-1] = self._problem.size
        for step in reversed(range(self._devices + 1)):
            rows = (*self._walk.open[step], *self._walk.closed[step])
            for boundary, place in zip(rows, history[step].places[:, best], strict=True):
                boundaries[boundary] = int(place)
            best = int(history[step].parents[best])
        return boundaries, values

    def _count(self, number: int) -> None:
        self._created += number
        if self._created > self._most_states:
            raise PartitionError(
                f"no proven optimum for {self._problem.num_stages} stages of "
                f"{self._problem.size} layers with num_virtual_stages="
                f"{self._problem.num_virtual_stages}: the search "
                f"passed its limit of {self._most_states:,} states; narrow it with min_layers and "
                "max_layers, keep layers together with same_stage, or use fewer virtual stages"
            )

    def _starts(self) -> _States:
        """Returns all ways to place the boundaries that the first step must know."""
        problem = self._problem
        places = np.zeros((0, 1), dtype=np.int64)
        before, begin = 0, np.zeros(1, dtype=np.int64)
        for boundary in self._walk.starts:
            low = np.maximum(begin + (boundary - before), int(self._first[boundary]))
            heaviest = self._loads[begin] + self._room_of(problem.stage_devices[before:boundary])
            high: Ints = search(self._loads, heaviest + self._slack, side="right") - 1
            high = np.minimum(high, int(self._last[boundary]))
            owner, place = expand(low, high)
            self._count(owner.size)
            places = np.concatenate([places[:, owner], place[None]])
            before, begin = boundary, place
        count = places.shape[1]
        keep = self._loads[-1] <= self._room[0] + self._slack
        keep = bool(keep) and not self.too_much_memory
        zero = np.zeros(count if keep else 0, dtype=problem.times.dtype)
        return _States(
            places[:, : zero.size],
            [zero] if self._most_squares is None else [zero, zero],
            np.zeros(zero.size, dtype=np.int64),
        )

    def _room_of(self, devices: Iterable[int]) -> float:
        """Returns the most load that devices can take, each counted once."""
        return float(sum(self._speeds[device] for device in set(devices)))

    def _step(self, states: _States, device: int) -> _States:
        problem, walk, bottleneck = self._problem, self._walk, self._bottleneck
        count = states.places.shape[1]
        owner: Ints = np.arange(int(count))
        rows = {boundary: row for row, boundary in enumerate(walk.open[device])}
        chosen: dict[int, Ints] = {}

        def place_of(boundary: int) -> Ints:
            if boundary in chosen:
                return chosen[boundary]
            if boundary in rows:
                return states.places[rows[boundary], owner]
            return np.full(owner.size, problem.size if boundary else 0, dtype=np.int64)

        def left_of(step: int, sums: Ints) -> Ints:
            """Returns the part of prefix sums that lies in stages not done yet."""
            left = np.zeros(owner.size, dtype=sums.dtype)
            for first, last in walk.gaps[step]:
                left = left + sums[place_of(last)] - sums[place_of(first)]
            return left

        spent = np.zeros(count, dtype=problem.times.dtype)
        held: Any = None if problem.memory is None else 0 * spent
        squares = np.zeros(count, dtype=problem.times.dtype)
        # This device must take at least so much, or the devices left cannot take the rest.
        needed = left_of(device, self._loads) - self._room[device + 1] - self._slack
        for turn in walk.turns[device]:
            is_last = turn is walk.turns[device][-1]
            grown, begin, end = self._stages(turn, place_of, bottleneck - spent, is_last, needed)
            self._count(grown.size)
            times = problem.stage_times(turn.stage, begin, end)
            spent = spent[grown] + times
            keep = spent <= bottleneck
            if turn.knows_end:
                keep &= end >= problem.first_end(begin)
                keep &= end <= problem.last_end(turn.stage, begin)
            if problem.memory is not None:
                held = held[grown] + problem.memory.units(turn.stage, begin, end)
                keep &= held <= problem.memory.limit
                held = held[keep]
            begin, end, spent = begin[keep], end[keep], spent[keep]
            grown = grown[keep]
            owner = owner[grown]
            if self._most_squares is not None:
                squares = squares[grown] + times[keep] * times[keep]
            needed = needed[grown] - (self._loads[end] - self._loads[begin])
            chosen = {boundary: place[grown] for boundary, place in chosen.items()}
            if not turn.knows_begin:
                chosen[turn.stage] = begin
            if not turn.knows_end:
                chosen[turn.stage + 1] = end
        values: list[Ints]
        if self._most_squares is not None:
            values = [states.values[0][owner] + spent * spent, states.values[1][owner] + squares]
        else:
            values = [np.maximum(states.values[0][owner], spent)]
        keep = np.ones(owner.size, dtype=bool)
        if self._bytes is not None:
            missing = left_of(device + 1, self._bytes)
            keep &= np.asarray(missing <= self._limit * (self._devices - 1 - device), dtype=bool)
        if self._most_squares is not None and device + 1 < self._devices:
            rest = np.maximum(left_of(device + 1, self._loads) - self._slack, 0.0)
            so_far: Ints = np.asarray(values[0] >> 2 * self._shift, dtype=np.float64)
            bound: Ints = so_far + rest**2 / self._weight[device + 1]
            keep &= bound <= float((self._most_squares >> 2 * self._shift) + 1) * (1 + 1e-9)
        after_rows = [place_of(b) for b in (*walk.open[device + 1], *walk.closed[device + 1])]
        places = np.stack(after_rows) if after_rows else np.zeros((0, owner.size), dtype=np.int64)
        after = _States(places, values, owner).take(np.flatnonzero(keep))
        return _best_of_each(after, len(walk.open[device + 1]), problem.size + 1)

    def _stages(
        self,
        turn: Turn,
        place_of: Callable[[int], Ints],
        room: Ints,
        is_last: bool,
        needed: Ints,
    ) -> tuple[Ints, Ints, Ints]:
        """Returns all ways to cut a stage: for each its state, its begin and its end."""
        problem, stage, loads = self._problem, turn.stage, self._loads
        if turn.knows_begin and turn.knows_end:
            begin, end = place_of(stage), place_of(stage + 1)
            return np.arange(int(begin.size)), begin, end
        prefix = problem.prefix(stage)
        beyond = place_of(turn.beyond)
        gap = self._room_of(turn.between) + self._slack
        if turn.knows_begin:
            begin = place_of(stage)
            low = np.maximum(problem.first_end(begin), int(self._first[stage + 1]))
            high = np.minimum(problem.last_end(stage, begin), int(self._last[stage + 1]))
            # Every stage between takes a layer, and no more load than its device can take.
            high = np.minimum(high, beyond - (turn.beyond - stage - 1))
            high = np.minimum(high, search(prefix, prefix[begin] + room, side="right") - 1)
            least = loads[begin] + needed if is_last else loads[beyond] - gap
            low = np.maximum(low, search(loads, least, side="left"))
            grown, end = expand(low, high)
            return grown, begin[grown], end
        end = place_of(stage + 1)
        low = np.maximum(beyond + (stage - turn.beyond), int(self._first[stage]))
        low = np.maximum(low, search(prefix, prefix[end] - room, side="left"))
        high = np.minimum(end - 1, int(self._last[stage]))
        most = loads[end] - needed if is_last else loads[beyond] + gap
        high = np.minimum(high, search(loads, most, side="right") - 1)
        grown, begin = expand(low, high)
        return grown, begin, end[grown]


def _device_speeds(problem: Problem) -> list[float]:
    """Returns the speed of each device."""
    speeds = [0.0] * problem.num_devices
    for device, kind in zip(problem.stage_devices, problem.kind_of_stage, strict=True):
        speeds[device] = float(problem.times.kinds[kind][0])
    return speeds


def _best_of_each(states: _States, num_open: int, base: int) -> _States:
    """Keeps one state of least value for each set of places of the open boundaries."""
    count = states.places.shape[1]
    if count < 2:
        return states
    key = np.zeros(count, dtype=np.int64 if base**num_open < 2**62 else object)
    for column in states.places[:num_open]:
        key = key * base + column
    order = np.argsort(key, kind="stable")
    for value in states.values:
        ordered = key[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        least = np.minimum.reduceat(value[order], starts)
        group = np.repeat(np.arange(starts.size), np.diff(np.append(starts, order.size)))
        order = order[value[order] == least[group]]
    ordered = key[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return states.take(order[first])


def virtual_cut(problem: Problem) -> tuple[list[int], int] | None:
    """Returns the best cut and its largest device sum, or `None` if no cut is allowed."""
    # The largest sum is least; then the sum of squared device sums; then that of squared stage
    # times. A search that grows beyond `MOST_STATES` raises a `PartitionError`.
    least = _least_bottleneck(problem)
    if least is None:
        return None
    bottleneck = problem.tied(int(least[1][0]))
    devices = problem.num_devices
    if 4 * devices * bottleneck * bottleneck >= 2**62 and problem.times.dtype is np.int64:
        problem = dataclasses.replace(problem, times=problem.times.as_objects())
    best = _Search(problem, bottleneck, _device_squares(problem, least[0])).run()
    assert best is not None
    return best[0], bottleneck


def _least_bottleneck(
    problem: Problem, most_states: int | None = None
) -> tuple[list[int], list[Any]] | None:
    """Raises a bound that is certainly too low until there is a cut."""
    low, forever = _least_sum(problem), problem.forever
    step = max(low // 256, 1)
    while True:
        trial = min(low + step, forever)
        search_ = _Search(problem, trial, most_states=most_states)
        if search_.too_much_memory:
            return None
        best = search_.run()
        if best is not None or trial >= forever:
            return best
        step *= 2


def virtual_has_cut(problem: Problem, bottleneck: int | None) -> bool:
    """Returns True if some cut has no device sum above the bottleneck."""
    # Explanations of cuts and errors call this many times, so it gives up early.
    most_states = MOST_STATES // 16
    if bottleneck is None:
        # From below: without a bound on the sums there would be no bound on the states.
        return _least_bottleneck(problem, most_states) is not None
    return _Search(problem, bottleneck, most_states=most_states).run() is not None


def _least_sum(problem: Problem) -> int:
    """Returns a number just below a sum that some device certainly reaches."""
    loads: list[float] = []
    shift = _shift(problem)
    for kind in sorted(set(problem.kind_of_stage)):
        # Every device at the speed of the fastest would share the load in proportion.
        speed = float(problem.times.kinds[kind][0])
        loads.append(float(problem.times.prefix(kind)[-1] >> shift) * speed)
    least = min(loads) / sum(_device_speeds(problem))
    if len(set(problem.kind_of_stage)) == 1:
        least = max(least, float(np.diff(problem.prefix(0)).max() >> shift))
    return max((int(least * (1 - 1e-9)) - 1) << shift, 0)


def _shift(problem: Problem) -> int:
    """Returns the bits to shift times before they become floats, which end at 2^1024."""
    return max(problem.forever.bit_length() - 60, 0)


def _device_squares(problem: Problem, cut: list[int]) -> int:
    sums = [0] * problem.num_devices
    for stage in range(problem.num_stages):
        time = problem.stage_times(stage, np.asarray(cut[stage]), np.asarray(cut[stage + 1]))
        sums[problem.stage_devices[stage]] += int(time)
    return sum(total * total for total in sums)
