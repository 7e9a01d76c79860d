"""A schedule with times, and the bubbles, memory and critical path that follow from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import EFFECTS, Action, makers
from pipemesh.schedule.bounds import lower_bound
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Span:
    """One action with its row, its position in the row, and its time."""

    device: int
    tick: int
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class LinkSpan:
    """A fetch of weights, or a sum of gradients, over the link of a device.

    Attributes:
        device: the device, by its row.
        stage: the stage.
        kind: `G` if the device gathers the stage's weights from its replicas, `S` for the sum of
            the stage's gradients over them.
        start, end: the time.
    """

    device: int
    stage: int
    kind: str
    start: float
    end: float


def fetches_of(schedule: Schedule, seconds: Sequence[float]) -> list[list[float]]:
    """Returns for each action the time in which its device fetches weights for it, from `seconds`.

    A device with one stage fetches before its first action and keeps the weights. Otherwise it
    would hold those of several stages, so it fetches for each action that needs weights: all but
    `W`, and a backward right behind its `R`, which goes on with the same weights.
    """
    counts = Counter(schedule.stage_devices)
    fetches: list[list[float]] = []
    for row in schedule.rows:
        times: list[float] = []
        for before, action in zip((None, *row), row, strict=False):
            keeps = counts[schedule.stage_devices[action.stage]] == 1 and before is not None
            goes_on = action.kind in "BI" and before == action.also("R")
            needs_none = action.kind == "W" or keeps or goes_on
            times.append(0.0 if needs_none else seconds[action.stage])
        fetches.append(times)
    return fetches


def gradient_sums(
    ends: Sequence[float],
    stage_devices: Sequence[int],
    seconds: Sequence[float],
    fetches: Iterable[LinkSpan] = (),
) -> tuple[LinkSpan, ...]:
    """Returns the sums of all stages' gradients in order of time; those without one are left out.

    Each begins when its stage is done, at `ends`, and when the link of its device has time for it:
    between `fetches`, which actions wait for, and behind sums that began earlier.
    """
    busy: dict[int, list[tuple[float, float]]] = {device: [] for device in stage_devices}
    for each in sorted(fetches, key=lambda each: each.start):
        busy[each.device].append((each.start, each.end))
    free = dict.fromkeys(stage_devices, 0.0)
    sums: list[LinkSpan] = []
    for end, stage in sorted((end, stage) for stage, end in enumerate(ends) if seconds[stage]):
        device = stage_devices[stage]
        start = max(end, free[device])
        for begin, until in busy[device]:
            if start + seconds[stage] <= begin:
                break
            start = max(start, until)
        free[device] = start + seconds[stage]
        sums.append(LinkSpan(device, stage, "S", start, free[device]))
    return tuple(sorted(sums, key=lambda each: each.start))


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A schedule with the start and end of every action, simulated or measured.

    Time starts at 0 and is in the unit of the costs.

    Attributes:
        schedule: the schedule.
        costs: the costs of its actions.
        starts: for each device the start of each of its actions.
        ends: for each device the end of each of its actions.

    Example:
        >>> from pipemesh.schedule import Costs, gpipe, simulate
        >>> timeline = simulate(gpipe(2, 2), Costs(forward=1, backward=2))
        >>> timeline.makespan, timeline.bubble, timeline.peak_activations
        (9.0, (3.0, 3.0), (2, 2))
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """The end of the last action."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @cached_property
    def stage_ends(self) -> tuple[float, ...]:
        """For each stage the end of its last action."""
        ends = [0.0] * self.schedule.num_stages
        for row, row_ends in zip(self.schedule.rows, self.ends, strict=True):
            # A row is in order of time.
            for action, end in zip(row, row_ends, strict=True):
                ends[action.stage] = end
        return tuple(ends)

    @cached_property
    def fetches(self) -> tuple[LinkSpan, ...]:
        """The fetches of weights over links, device by device; empty if they take no time.

        Each begins when its device has ended the action before, or at 0.

        Example:
            >>> from pipemesh.schedule import Costs, one_f_one_b, simulate
            >>> timeline = simulate(one_f_one_b(2, 2), Costs(all_gather=[0.5, 3]))
            >>> [(each.stage, each.start, each.end) for each in timeline.fetches]
            [(0, 0.0, 0.5), (1, 0.0, 3.0)]
            >>> [row[0] for row in timeline.starts]
            [0.5, 3.0]
        """
        spans: list[LinkSpan] = []
        for device, row in enumerate(self._fetch_times):
            free = (0.0, *self.ends[device])
            for action, seconds, start in zip(self.schedule.rows[device], row, free, strict=False):
                if seconds:
                    spans.append(LinkSpan(device, action.stage, "G", start, start + seconds))
        return tuple(spans)

    @cached_property
    def _fetch_times(self) -> list[list[float]]:
        """For each action the time in which its device fetches weights for it."""
        seconds = self.costs.per_stage(self.schedule.num_stages).all_gather
        return fetches_of(self.schedule, seconds) if any(seconds) else []

    @cached_property
    def sums(self) -> tuple[LinkSpan, ...]:
        """The sums of gradients over replicas, in order of time; empty if they take no time.

        Example:
            >>> from pipemesh.schedule import Costs, one_f_one_b, simulate
            >>> timeline = simulate(one_f_one_b(2, 2), Costs(gradient_sum=[1, 5]))
            >>> [(each.stage, each.start, each.end) for each in timeline.sums]
            [(1, 7.0, 12.0), (0, 9.0, 10.0)]
            >>> timeline.makespan, timeline.end
            (9.0, 12.0)
        """
        if self.schedule.is_forward_only:
            return ()
        seconds = self.costs.per_stage(self.schedule.num_stages).gradient_sum
        return gradient_sums(self.stage_ends, self.schedule.stage_devices, seconds, self.fetches)

    @property
    def link_spans(self) -> tuple[LinkSpan, ...]:
        """All that links do beside actions: fetches of weights, and sums of gradients."""
        return (*self.fetches, *self.sums)

    @property
    def links(self) -> list[int]:
        """The devices whose links have fetches or sums, in ascending order."""
        return sorted({each.device for each in self.link_spans})

    @property
    def end(self) -> float:
        """The end of the last action and of the last sum of gradients."""
        return max([self.makespan, *(each.end for each in self.sums)])

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each device the time it spends in actions."""
        return tuple(
            sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """For each device its idle time within the makespan, before, between and after actions."""
        return tuple(self._idle(self.makespan - busy) for busy in self.busy)

    @cached_property
    def own_span_bubble(self) -> tuple[float, ...]:
        """For each device its idle time between its own first and last action.

        Where the optimizer needs no barrier over all devices, the next step of an early device
        can start while a late one still works, and only this bubble costs time.
        """
        return tuple(
            self._idle((ends[-1] - starts[0] if ends else 0.0) - busy)
            for starts, ends, busy in zip(self.starts, self.ends, self.busy, strict=True)
        )

    def _idle(self, time: float) -> float:
        """Returns an idle time, 0 if it is round-off."""
        return time if time > 1e-12 * self.makespan else 0.0

    @property
    def total_bubble(self) -> float:
        """The sum of `bubble` over devices."""
        return sum(self.bubble)

    @property
    def bubble_ratio(self) -> float:
        """The idle share of all device time within the makespan, from 0 to 1."""
        total = self.makespan * self.schedule.num_devices
        return self.total_bubble / total if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each device the most (stage, microbatch) pairs it ever holds at once.

        A pair is held from the start of its `F` to the end of its `B` or `W`; in a forward-only
        schedule to the end of the `F`. One with an `R` is not held between the end of `F` and the
        start of `R`, where only what the recomputation starts from is there. On a device with `V`
        stages a pair is `1 / V` of a microbatch's activations there, and if sequences are cut into
        `Q` slices `1 / Q` of that, because each slice is a pair of its own.
        """
        if self.schedule.is_forward_only:
            return tuple(min(1, len(row)) for row in self.schedule.rows)
        return tuple(peak_of_row(row) for row in self.schedule.rows)

    @cached_property
    def peak_inputs(self) -> tuple[int, ...]:
        """For each device the most pairs of which only what `R` starts from is held."""
        change = {"F": 1, "R": -1}

        def peak(row: tuple[Action, ...]) -> int:
            again = _recomputations(row)
            changes = (change.get(a.kind, 0) for a in row if a.also("R") in again)
            return max(itertools.accumulate(changes), default=0)

        return tuple(map(peak, self.schedule.rows))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most microbatches, or slices, whose activations it holds at once.

        Counted as in `peak_activations`, but stage by stage: what a device holds at once is at
        most the sum over its stages, whose peaks need not coincide.

        Example:
            >>> from pipemesh.schedule import simulate, zb_v
            >>> simulate(zb_v(2, 4)).in_flight
            (4, 3, 2, 1)
        """
        held, peaks = ([0] * self.schedule.num_stages for _ in range(2))
        forward_only = self.schedule.is_forward_only
        for row in self.schedule.rows:
            for action, at_start, at_end in _held_changes(row, forward_only):
                stage = action.stage
                held[stage] += at_start
                peaks[stage] = max(peaks[stage], held[stage])
                held[stage] += at_end
        return tuple(peaks)

    def for_partition(self) -> dict[str, Any]:
        """Returns arguments of `pipemesh.partition.partition` that follow from the schedule.

        Example:
            >>> from pipemesh.schedule import one_f_one_b, simulate
            >>> simulate(one_f_one_b(2, 4)).for_partition()
            {'num_microbatches': 4, 'in_flight': (2, 1), 'stage_devices': (0, 1), 'at_once': (0, 4)}
        """
        schedule = self.schedule
        # Slices of the last microbatch that is not complete take a share of it each.
        flights = tuple(-(-count // schedule.num_slices) for count in self.in_flight)
        turns = Counter(stage for stage, _ in schedule.turns_at_once())
        at_once = (Fraction(turns[stage], schedule.num_slices) for stage in range(len(flights)))
        return {
            "num_microbatches": schedule.num_microbatches,
            "in_flight": flights,
            "stage_devices": schedule.stage_devices,
            # Of whole microbatches it is a whole number.
            "at_once": tuple(int(n) if n.denominator == 1 else n for n in at_once),
        }

    @cached_property
    def lower_bound(self) -> float:
        """A makespan that no schedule beats that does the same work and holds no more.

        The same work: the same costs, stages on the same devices, number of microbatches and
        slices, and as many recomputations on each stage. No more: on no device more (stage,
        microbatch) pairs than here. Proved in `pipemesh.schedule.bounds` for the costs as they
        are; a measured or jittered makespan may be below it.
        """
        schedule = self.schedule
        again = Counter(stage for stage, _ in schedule.recomputed())
        return lower_bound(
            self.costs,
            schedule.stage_devices,
            schedule.num_microbatches,
            self.peak_activations,
            forward_only=schedule.is_forward_only,
            num_slices=schedule.num_slices,
            recomputed=[again[stage] for stage in range(schedule.num_stages)],
        )

    @property
    def above_bound(self) -> float:
        """The share of the makespan above `lower_bound`: its largest distance from the optimum.

        Example:
            >>> from pipemesh.schedule import one_f_one_b, simulate
            >>> simulate(one_f_one_b(4, 8)).above_bound
            0.1
        """
        bound = self.lower_bound
        # Round-off is no time.
        return round(max(0.0, self.makespan - bound) / bound, 12) if bound else 0.0

    def spans(self) -> Iterator[Span]:
        """Yields every action with its time, device by device."""
        for device, row in enumerate(self.schedule.rows):
            times = zip(self.starts[device], self.ends[device], strict=True)
            for tick, (action, (start, end)) in enumerate(zip(row, times, strict=True)):
                yield Span(device, tick, action, start, end)

    def activations(self, device: int) -> tuple[tuple[float, int], ...]:
        """Returns the number of (stage, microbatch) pairs that a device holds over time.

        Returns:
            (time, pairs held from then on) at every change, in order of time. A peak that lasts no
            time has an entry of its own, before the one of the same time that lasts.

        Raises:
            ScheduleError: the device does not exist.

        Example:
            >>> from pipemesh.schedule import gpipe, simulate
            >>> simulate(gpipe(1, 2)).activations(0)
            ((0.0, 1), (1.0, 2), (4.0, 1), (6.0, 0))
        """
        changes: list[tuple[float, int]] = []
        forward_only = self.schedule.is_forward_only
        if device not in range(self.schedule.num_devices):
            raise ScheduleError(
                f"device is {device!r}; it must be from 0 to {self.schedule.num_devices - 1}"
            )
        held_changes = _held_changes(self.schedule.rows[device], forward_only)
        times = zip(self.starts[device], self.ends[device], strict=True)
        for (_, at_start, at_end), (start, end) in zip(held_changes, times, strict=True):
            changes += [(start, at_start)] if at_start else []
            changes += [(end, at_end)] if at_end else []
        held = 0
        curve: list[tuple[float, int]] = []
        for time, group in itertools.groupby(changes, key=lambda change: change[0]):
            counts = list(itertools.accumulate((change for _, change in group), initial=held))
            before, held = held, counts[-1]
            if max(counts) > max(before, held):
                # Activations are held also by an action that takes no time.
                curve.append((time, max(counts)))
            curve.append((time, held))
        return tuple(curve)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """A chain of actions that explains the makespan, first to last.

        Each starts when the one before it has ended, or when its result has arrived; shortening
        an action that is not in the chain does not shorten the step. Where several chains are
        equally long, the one that stays on a device longest is returned.
        """
        where = {
            action: (device, tick)
            for device, row in enumerate(self.schedule.rows)
            for tick, action in enumerate(row)
        }
        last = max(
            (device for device, row in enumerate(self.ends) if row),
            key=lambda device: self.ends[device][-1],
        )
        device, tick = last, len(self.ends[last]) - 1
        path: list[Span] = []
        while True:
            action, start = self.schedule.rows[device][tick], self.starts[device][tick]
            path.append(Span(device, tick, action, start, self.ends[device][tick]))
            before = self.ends[device][tick - 1] if tick else -math.inf
            if self._fetch_times and (fetch := self._fetch_times[device][tick]):
                before = max(before, 0.0) + fetch
            sources = [where[a] for a in self._sources(action) if a in where]
            if start <= 0 or not (tick or sources):
                return tuple(reversed(path))
            # A measured action does not start exactly when another one ends.
            if not sources or before >= self._arrival(*sources[0], device):
                if not tick:
                    return tuple(reversed(path))
                tick -= 1
            else:
                device, tick = sources[0]

    def _arrival(self, device: int, tick: int, receiver: int) -> float:
        """Returns the time from which a device can use the result of an action."""
        end = self.ends[device][tick]
        if device == receiver:
            return end
        action = self.schedule.rows[device][tick]
        transfer = self.costs.per_stage(self.schedule.num_stages).transfer
        return end + transfer[action.stage if action.kind == "F" else action.stage - 1]

    def _sources(self, action: Action) -> tuple[Action, ...]:
        """Returns the actions that may make the value that an action takes from another stage."""
        value = EFFECTS[action.kind].neighbour
        if value is None or not 0 <= action.stage + value.step < self.schedule.num_stages:
            return ()
        return tuple(action.also(kind, value.step) for kind in makers(value.name))


def peak_of_row(row: tuple[Action, ...]) -> int:
    """Returns the most (stage, microbatch) pairs held at once in a row with backward actions."""
    held = peak = 0
    for _, at_start, at_end in _held_changes(row):
        held += at_start
        peak = max(peak, held)
        held += at_end
    return peak


def _recomputations(row: tuple[Action, ...]) -> frozenset[Action]:
    return frozenset(action for action in row if action.kind == "R")


def _held_changes(
    row: tuple[Action, ...], forward_only: bool = False
) -> Iterator[tuple[Action, int, int]]:
    """Yields each action, and how its start and its end change the number of held pairs."""
    again = _recomputations(row)
    for action in row:
        effect = EFFECTS[action.kind]
        ends = effect.releases or (
            action.kind == "F" and (forward_only or bool(again and action.also("R") in again))
        )
        yield action, int(effect.begins_to_hold), -int(ends)
