"""When actions run on devices that share cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import KINDS
from pipemesh.schedule.checks import check_number, check_type
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.names import check_name
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.table import NOTHING, compile_table, deadlock_error
from pipemesh.schedule.timeline import Timeline

Loads = float | Mapping[str, float | Sequence[float]]
"""Cores that an action keeps busy when it is alone: one number, or by kind, one or one a stage."""


def simulate_sharing(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    cores: float,
    loads: Loads = 1.0,
    crowding: float = 0.0,
) -> Timeline:
    """Runs a schedule on devices that share the cores of one machine.

    As `simulate`, but while more cores are wanted than there are, all actions that run slow down
    alike: each goes on at the rate `cores / wanted`. That is processor sharing, what a fair
    scheduler of threads comes to (Kleinrock, "Time-shared systems: a theoretical treatment", 1967).
    The sum of all loads is known at any time, and changes when an action starts or ends.

    A scheduler of threads that is unfair for some milliseconds, or that packs them, lets two share
    a core while another one idles. If they lie on cores at random, `wanted` of them keep
    `cores * (1 - (1 - 1 / cores) ** wanted)` busy (balls in urns: Feller, "An introduction to
    probability theory and its applications", 1968, section IV.2). What an action loses so to itself
    is in its duration; what several lose to each other is not.

    Args:
        schedule: any valid schedule.
        costs: durations of actions that run alone, per stage; by default `Costs()`.
        cores: that all devices share, above 0; need not be whole.
        loads: cores that an action keeps busy when it is alone; 0 for one that only waits.
        crowding: from 0, where threads of actions of several devices are spread over the cores, to
            1, where they lie there at random.

    Returns:
        The start and end of every action; `Timeline.costs` are those of actions alone.

    Raises:
        ScheduleError: the schedule is not valid, the costs do not fit its stages, or a number is
            out of range.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> costs = Costs(forward=1, backward=2)
        >>> [simulate_sharing(gpipe(2, 4), costs, cores=n).makespan for n in (2, 1.5, 1)]
        [15.0, 18.0, 24.0]
    """
    cores = check_number("cores", cores, above=True)
    crowding = check_number("crowding", crowding, most=1)
    table = compile_table(schedule)
    costs = Costs() if costs is None else check_type("costs", costs, Costs)
    stages, number = schedule.num_stages, schedule.num_pieces
    stage_costs = costs.per_stage(stages)
    durations = stage_costs.durations()
    work = [value for kind in KINDS for value in durations[kind]]
    load = [value for kind in KINDS for value in _loads_of(loads, kind, stages)]
    forward_lag = list(stage_costs.transfer)
    lag = forward_lag + ([0.0, *forward_lag[:-1]] * (len(KINDS) - 1))

    unknown = -1.0
    end = [unknown] * table.num_codes
    starts: list[list[float]] = [[] for _ in table.codes]
    ends: list[list[float]] = [[] for _ in table.codes]
    # Devices that compute: what is left of their action, and its load.
    left: dict[int, float] = {}
    using: dict[int, float] = {}
    # Devices that wait for a time that is known, and for the end of an action.
    waking: dict[int, float] = {}
    sleeper: dict[int, int] = {}
    idle = list(range(schedule.num_devices))
    now = 0.0
    while True:
        while idle:
            device = idle.pop()
            tick = len(ends[device])
            if tick == len(table.codes[device]):
                continue
            source, arrival = table.waits[device][tick], now
            if source != NOTHING:
                arrival = end[source]
                if arrival == unknown:
                    sleeper[source] = device
                    continue
                if table.remote[device][tick]:
                    arrival += lag[source // number]
            if arrival > now:
                waking[device] = arrival
                continue
            place = table.codes[device][tick] // number
            starts[device].append(now)
            left[device], using[device] = work[place], load[place]
        if not left and not waking:
            break
        wanted = sum(using.values())
        alone = sum(map(bool, using.values())) < 2
        there = _busy(wanted, cores, 0.0 if alone else crowding)
        rate = there / wanted if wanted else 1.0
        rates = {device: rate if using[device] else 1.0 for device in left}
        due = min((seconds / rates[device] for device, seconds in left.items()), default=math.inf)
        wake = min(waking.values(), default=math.inf)
        # What ends now ends now, though a difference of times may say a little later.
        step = min(due, wake - now)
        then = now + due if due <= wake - now else wake
        for device in list(left):
            left[device] -= step * rates[device]
            if left[device] <= 1e-12 * (then - starts[device][-1]):
                code = table.codes[device][len(ends[device])]
                ends[device].append(then)
                end[code] = then
                del left[device], using[device]
                idle.append(device)
                if code in sleeper:
                    idle.append(sleeper.pop(code))
        now = then
        for device in [d for d, at in waking.items() if at <= now]:
            del waking[device]
            idle.append(device)
    position = [len(row) for row in ends]
    if any(tick < len(codes) for tick, codes in zip(position, table.codes, strict=True)):
        raise deadlock_error(schedule, table, position)
    return Timeline(schedule, costs, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _busy(wanted: float, cores: float, crowding: float) -> float:
    """How many cores so many threads keep busy."""
    most = min(wanted, cores)
    if not crowding or cores <= 1:
        return most
    at_random = cores * (1 - (1 - 1 / cores) ** wanted)
    return most + crowding * min(0.0, at_random - most)


def _loads_of(loads: Loads, kind: str, stages: int) -> Sequence[float]:
    """One load a stage for a kind of action."""
    value: Any = loads
    if isinstance(loads, Mapping):
        for name in loads:
            check_name("kind of action in loads", name, KINDS)
        value = loads.get(kind, 1.0)
    name = f"the load of {kind}"
    if not hasattr(value, "__len__") or isinstance(value, str):
        return [check_number(name, value)] * stages
    found = [check_number(name, item) for item in value]
    if len(found) != stages:
        raise ScheduleError(
            f"{name} has {len(found)} values, but the schedule has {stages} stages; "
            "give one number, or one value a stage"
        )
    return found
