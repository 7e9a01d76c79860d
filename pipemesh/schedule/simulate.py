"""When every action of a schedule starts and ends."""

from __future__ import annotations

import random

from pipemesh.schedule.action import KINDS
from pipemesh.schedule.checks import check_number, check_type
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.table import NOTHING, compile_table, deadlock_error
from pipemesh.schedule.timeline import Timeline


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, jitter: float = 0.0, seed: int = 0
) -> Timeline:
    """Runs a schedule on devices that do nothing but wait for their next action.

    An action starts when its device has finished the one before it in its row and when what it
    consumes has arrived. Events drive the run: a device goes on until it needs a result that is
    not there yet, and the end of that action wakes it. Every action is visited once, so the time
    taken is proportional to the number of actions.

    Args:
        schedule: any valid schedule.
        costs: durations per stage; by default `Costs()`, one unit for `F`, `R`, `I` and `W`.
        jitter: spread of the durations; each action's duration is multiplied by its own random
            factor from `1 - jitter` to `1 + jitter`. From 0 to 1.
        seed: of the random factors; the same seed gives the same timeline.

    Returns:
        The start and end of every action, and what follows from them.

    Raises:
        ScheduleError: the schedule is not valid, the costs do not fit its stages, or `jitter`
            is out of range.

    Example:
        >>> from pipemesh.schedule import one_f_one_b
        >>> simulate(one_f_one_b(4, 8), Costs(forward=1, backward=2)).makespan
        33.0
    """
    jitter = check_number("jitter", jitter, most=1)
    table = compile_table(schedule)
    costs = Costs() if costs is None else check_type("costs", costs, Costs)
    stage_costs = costs.per_stage(schedule.num_stages)
    # Indexed by code // num_pieces, which is kind * num_stages + stage.
    durations = stage_costs.durations()
    duration = [value for kind in KINDS for value in durations[kind]]
    num_pieces = schedule.num_pieces
    num_stages = schedule.num_stages
    # A result of stage s crosses the boundary above s going forward, the one below going back.
    forward_lag = list(stage_costs.transfer)
    lag = forward_lag + ([0.0, *forward_lag[:-1]] * (len(KINDS) - 1))
    factor = random.Random(check_type("seed", seed, int)).uniform

    unknown = -1.0
    end = [unknown] * table.num_codes
    starts: list[list[float]] = [[] for _ in table.codes]
    ends: list[list[float]] = [[] for _ in table.codes]
    sleeper: dict[int, int] = {}
    runnable = list(range(schedule.num_devices))
    while runnable:
        device = runnable.pop()
        codes, waits, remote = table.codes[device], table.waits[device], table.remote[device]
        row_starts, row_ends = starts[device], ends[device]
        now = row_ends[-1] if row_ends else 0.0
        for tick in range(len(row_ends), len(codes)):
            source = waits[tick]
            if source != NOTHING:
                arrival = end[source]
                if arrival == unknown:
                    sleeper[source] = device
                    break
                if remote[tick]:
                    arrival += lag[source // num_pieces]
                if arrival > now:
                    now = arrival
            code = codes[tick]
            row_starts.append(now)
            length = duration[code // num_pieces]
            if jitter:
                length *= factor(1 - jitter, 1 + jitter)
            now += length
            row_ends.append(now)
            end[code] = now
            if code in sleeper:
                runnable.append(sleeper.pop(code))
    position = [len(row) for row in ends]
    if any(tick < len(codes) for tick, codes in zip(position, table.codes, strict=True)):
        raise deadlock_error(schedule, table, position)
    assert len(duration) == len(KINDS) * num_stages
    return Timeline(schedule, costs, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
