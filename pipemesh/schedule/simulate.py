"""The start and end of every action of a schedule: the only place that runs one."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import EFFECTS, KINDS, OUTPUTS, Action, Value
from pipemesh.schedule.checks import check_name, check_number, check_type
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.table import NOTHING, Table, compile_table, deadlock_error
from pipemesh.schedule.timeline import Timeline, fetches_of

Loads = float | Mapping[str, float | Sequence[float]]
"""Cores that an action keeps busy when it is alone: one number, or by kind, one or one a stage."""
Times = list[list[float]]
"""For each device one number for each of its actions."""
# By kind, whether its result is for the stage after it.
_GOES_UP = tuple(Value(OUTPUTS) in EFFECTS[kind].gives for kind in KINDS)


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    jitter: float = 0.0,
    seed: int = 0,
    cores: float | None = None,
    loads: Loads = 1.0,
    crowding: float = 0.0,
    slice_shares: Sequence[Sequence[float]] = (),
) -> Timeline:
    """Runs a schedule on devices that do nothing but wait for their next action.

    An action starts when its device has finished the one before it in its row and when what it
    consumes has arrived, weights that it fetches too. Every action is visited once, so without
    `cores` the time taken is proportional to the number of actions.

    With `cores` all devices share the cores of one machine. While more cores are wanted than the
    machine has, all running actions slow down alike: each proceeds at the rate `cores / wanted`.
    That is processor sharing, the limit of a fair scheduler of threads (Kleinrock, "Time-shared
    systems: a theoretical treatment", 1967).

    A scheduler that is unfair for some milliseconds, or that packs threads, lets two share a core
    while another one idles. If `wanted` threads lie on the cores at random, they keep
    `cores * (1 - (1 - 1 / cores) ** wanted)` cores busy (balls in urns: Feller, "An introduction to
    probability theory and its applications", 1968, section IV.2). An action's duration includes the
    cores it leaves idle itself, but not contention with other actions.

    Args:
        schedule: any valid schedule.
        costs: durations per stage, of actions that run alone; by default `Costs()`, one unit for
            `F`, `R`, `I` and `W`.
        jitter: spread of the durations; each action's duration is multiplied by its own random
            factor from `1 - jitter` to `1 + jitter`. From 0 to 1.
        seed: seed of the random factors; the same seed gives the same timeline.
        cores: number of cores that all devices share, above 0; need not be whole. None if each
            device computes by itself.
        loads: with `cores`, the cores that an action keeps busy when it is alone; 0 for one that
            only waits.
        slice_shares: for each stage the durations of its slices, first to last, as multiples of
            those in `costs`, which are then means. Piece `p` of a table is slice `p` modulo their
            number. Empty if all slices take the same.
        crowding: with `cores`, from 0, where threads of several devices are spread over the
            cores, to 1, where they lie there at random.

    Returns:
        The start and end of every action, and what follows from them; `Timeline.costs` are those
        of actions that run alone.

    Raises:
        ScheduleError: the schedule is not valid, the costs do not fit its stages, a number is out
            of range, or `loads` or `crowding` is given without `cores`.

    Example:
        >>> from pipemesh.schedule import gpipe, one_f_one_b
        >>> simulate(one_f_one_b(4, 8), Costs(forward=1, backward=2)).makespan
        33.0
        >>> costs = Costs(forward=1, backward=2)
        >>> [simulate(gpipe(2, 4), costs, cores=n).makespan for n in (2, 1.5, 1)]
        [15.0, 18.0, 24.0]
    """
    jitter = check_number("jitter", jitter, most=1)
    table = compile_table(schedule)
    costs = Costs() if costs is None else check_type("costs", costs, Costs)
    stage_costs = costs.per_stage(schedule.num_stages)
    # Indexed by code // num_pieces, which is kind * num_stages + stage.
    by_kind = stage_costs.durations()
    num_pieces = schedule.num_pieces

    def of_actions(values: Sequence[float]) -> Times:
        return [[values[code // num_pieces] for code in codes] for codes in table.codes]

    durations = of_actions([value for kind in KINDS for value in by_kind[kind]])
    if slice_shares:
        _check_slice_shares(slice_shares, schedule)
        durations = [
            [
                duration * shares[code % num_pieces % len(shares)]
                for duration, code in zip(row, codes, strict=True)
                for shares in [slice_shares[code // num_pieces % schedule.num_stages]]
            ]
            for row, codes in zip(durations, table.codes, strict=True)
        ]
    # Outputs of stage s cross the boundary above s, gradients the one below.
    above, below = stage_costs.transfer, (0.0, *stage_costs.transfer[:-1])
    lags = [lag for goes_up in _GOES_UP for lag in (above if goes_up else below)]
    factor = None
    check_type("seed", seed, int)
    if jitter:
        factor = functools.partial(random.Random(seed).uniform, 1 - jitter, 1 + jitter)
    shared = None
    if cores is not None:
        loads_by_kind = [load for k in KINDS for load in _loads_of(loads, k, schedule.num_stages)]
        shared = _SharedCores(
            check_number("cores", cores, above=True),
            check_number("crowding", crowding, most=1),
            of_actions(loads_by_kind),
        )
    elif not (isinstance(loads, float | int) and loads == 1 and crowding == 0):
        raise ScheduleError(
            "loads and crowding are for devices that share cores, but cores is None; give cores, "
            "or leave them out"
        )
    fetches = None
    if any(stage_costs.all_gather):
        fetches = fetches_of(schedule, stage_costs.all_gather)
    starts, ends = run_table(
        schedule, table, durations, lags=lags, fetches=fetches, factor=factor, shared=shared
    )
    return Timeline(schedule, costs, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def run_table(
    schedule: Schedule,
    table: Table,
    durations: Sequence[Sequence[float]],
    *,
    delays: Sequence[Sequence[float]] | None = None,
    lags: Sequence[float] | None = None,
    fetches: Sequence[Sequence[float]] | None = None,
    factor: Callable[[], float] | None = None,
    shared: _SharedCores | None = None,
) -> tuple[Times, Times]:
    """Returns the start and end of every action of a table."""
    # A device goes on until it needs a result that is not there yet; the end of that action wakes
    # it. Where devices share cores, an action's end depends on what others do meanwhile, so a
    # device also stops at each action until `shared` knows its end. `delays` are waits of each
    # action after everything it needs is there, `lags` transfer times by `code // num_pieces`.
    # `fetches` are times that begin when the device is free, before each action.
    num_pieces = schedule.num_pieces
    end: list[float | None] = [None] * table.num_codes
    starts: Times = [[] for _ in table.codes]
    ends: Times = [[] for _ in table.codes]
    sleeper: dict[int, int] = {}
    runnable = list(range(len(table.codes)))
    while runnable:
        device = runnable.pop()
        codes, waits, remote = table.codes[device], table.waits[device], table.remote[device]
        row_starts, row_ends, row_durations = starts[device], ends[device], durations[device]
        now = row_ends[-1] if row_ends else 0.0
        for tick in range(len(row_ends), len(codes)):
            fetched = now if fetches is None else now + fetches[device][tick]
            source = waits[tick]
            if source != NOTHING:
                arrival = end[source]
                if arrival is None:
                    sleeper[source] = device
                    break
                if lags is not None and remote[tick]:
                    arrival += lags[source // num_pieces]
                if arrival > now:
                    now = arrival
            if fetched > now:
                now = fetched
            if delays is not None:
                now += delays[device][tick]
            length = row_durations[tick]
            if factor is not None:
                length *= factor()
            if shared is not None:
                shared.begin(device, tick, now, length)
                break
            row_starts.append(now)
            now += length
            row_ends.append(now)
            code = codes[tick]
            end[code] = now
            if code in sleeper:
                runnable.append(sleeper.pop(code))
        if shared is not None and not runnable:
            for device, start, now in shared.next_ends():
                code = table.codes[device][len(ends[device])]
                starts[device].append(start)
                ends[device].append(now)
                end[code] = now
                runnable.append(device)
                if code in sleeper:
                    runnable.append(sleeper.pop(code))
    position = [len(row) for row in ends]
    if any(tick < len(codes) for tick, codes in zip(position, table.codes, strict=True)):
        raise deadlock_error(schedule, table, position)
    return starts, ends


def _check_slice_shares(shares: Sequence[Sequence[float]], schedule: Schedule) -> None:
    """Checks that each stage has as many shares, and that these divide the pieces."""
    counts = {len(of_stage) for of_stage in shares}
    count = counts.pop() if len(counts) == 1 else 0
    if len(shares) != schedule.num_stages or not count or schedule.num_pieces % count:
        raise ScheduleError(
            f"slice_shares has {len(shares)} rows of {', '.join(str(len(s)) for s in shares)} "
            f"numbers. Give {schedule.num_stages} rows, one a stage, each with one number a slice"
        )
    for of_stage in shares:
        for share in of_stage:
            check_number("a share of a slice", share)


class _SharedCores:
    """Actions that run at the same time on the cores of one machine; see `simulate`."""

    def __init__(self, cores: float, crowding: float, loads: Times) -> None:
        self._cores = cores
        self._crowding = crowding
        self._loads = loads
        self._now = 0.0
        # By device, of the actions that run: their start, what is left of them, and their load.
        self._starts: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self._using: dict[int, float] = {}
        # By device, of the actions that start at a later time that is known: start, duration, load.
        self._waiting: dict[int, tuple[float, float, float]] = {}

    def begin(self, device: int, tick: int, start: float, duration: float) -> None:
        """Starts an action of a device, now or later."""
        load = self._loads[device][tick]
        if start > self._now:
            self._waiting[device] = (start, duration, load)
        else:
            self._run(device, duration, load)

    def _run(self, device: int, duration: float, load: float) -> None:
        self._starts[device] = self._now
        self._left[device], self._using[device] = duration, load

    def next_ends(self) -> list[tuple[int, float, float]]:
        """Goes on to the next end of an action; returns device, start and end of all that end."""
        left, using, waiting = self._left, self._using, self._waiting
        ended: list[tuple[int, float, float]] = []
        while not ended and (left or waiting):
            rate = self._rate()
            rates = {device: rate if load else 1.0 for device, load in using.items()}
            due = min((seconds / rates[d] for d, seconds in left.items()), default=math.inf)
            wake = min((start for start, _, _ in waiting.values()), default=math.inf)
            # What ends now ends now, though a difference of times may say a little later.
            step = min(due, wake - self._now)
            now = self._now = self._now + due if due <= wake - self._now else wake
            for device in list(left):
                left[device] -= step * rates[device]
                if left[device] <= 1e-12 * (now - self._starts[device]):
                    del left[device], using[device]
                    ended.append((device, self._starts[device], now))
            if wake <= now:
                for device in [d for d, (start, _, _) in waiting.items() if start <= now]:
                    _, duration, load = waiting.pop(device)
                    self._run(device, duration, load)
        return ended

    def _rate(self) -> float:
        """Returns how fast actions proceed, compared with one that runs alone."""
        wanted = sum(self._using.values())
        busy = min(wanted, self._cores)
        if self._crowding and self._cores > 1 and sum(map(bool, self._using.values())) > 1:
            at_random = self._cores * (1 - (1 - 1 / self._cores) ** wanted)
            busy += self._crowding * min(0.0, at_random - busy)
        return busy / wanted if wanted else 1.0


def _loads_of(loads: Loads, kind: str, stages: int) -> Sequence[float]:
    """Returns the load of a kind of action on each stage."""
    value: Any = loads
    if isinstance(loads, Mapping):
        for name in loads:
            check_name("kind of action in loads", name, KINDS)
        value = loads.get(kind, 1.0)
    name = f"the load of {kind}"
    if not hasattr(value, "__len__") or isinstance(value, str):
        return [check_number(name, value)] * stages
    values = [check_number(name, item) for item in value]
    if len(values) != stages:
        raise ScheduleError(
            f"{name} has {len(values)} values, but the schedule has {stages} stages; "
            "give one number, or one value a stage"
        )
    return values


def rounds(schedule: Schedule, table: Table | None = None) -> list[list[tuple[int, int]]]:
    """Returns the (device, tick) pairs that act in each round, devices in ascending order."""
    # Rounds are units of time if every action takes one and transfers are free.
    table = table or compile_table(schedule)
    starts, _ = run_table(schedule, table, [[1.0] * len(codes) for codes in table.codes])
    last = max((int(row[-1]) for row in starts if row), default=-1)
    moves: list[list[tuple[int, int]]] = [[] for _ in range(last + 1)]
    for device, row in enumerate(starts):
        for tick, start in enumerate(row):
            moves[int(start)].append((device, tick))
    return moves


def lockstep(schedule: Schedule) -> tuple[tuple[Action | None, ...], ...]:
    """Puts the actions of a schedule on one clock, None where a device does nothing."""
    # A loop whose turns are ticks runs like that: every device computes something, and all hand it
    # on at the end.
    moves = rounds(schedule)
    rows: list[list[Action | None]] = [[None] * len(moves) for _ in schedule.rows]
    for clock, acting in enumerate(moves):
        for device, tick in acting:
            rows[device][clock] = schedule.rows[device][tick]
    return tuple(map(tuple, rows))
