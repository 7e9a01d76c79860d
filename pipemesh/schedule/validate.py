"""Checks that a schedule runs to its end. So it does with sends and receives that block, as
`tests/schedule/rendezvous.py` tries.

A schedule says what a device computes, not when it talks. Whether blocking sends deadlock
depends on where they are put. The obvious rule (send right after the action that produced the
value, receive right before the action that consumes it) deadlocks on plain 1F1B: in the steady
state device 0 holds an activation for device 1 while device 1 holds a gradient for device 0, and
both wait in a send.

The rule here is a clock. The schedule is walked in rounds; in each round every device that can
act performs one action; then all results of that round that another device needs change hands,
lower producing device first. Both sides post the transfer at that point: the producer right
after its action, the consumer right after its own last action so far. Every device therefore
meets its sends and receives in one common order, so the first transfer of that order which has
not happened yet can always happen: no deadlock, however long an action takes. The price is that
a device may hold a received value some rounds before it consumes it.
"""

from __future__ import annotations

import dataclasses

from pipemesh.schedule.action import Action
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import rounds
from pipemesh.schedule.table import compile_table


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A result on its way; each end of it returns when the other device has come to it, too."""

    action: Action
    device: int


class Send(Transfer):
    """A send of the result of `action` to `device`."""

    def __str__(self) -> str:
        return f"send({self.action} to {self.device})"


class Receive(Transfer):
    """A receive of the result of `action` from `device`."""

    def __str__(self) -> str:
        return f"receive({self.action} from {self.device})"


Step = Action | Send | Receive
"""A step of a device in a schedule with its transfers written out."""


def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """Returns all actions in an order in which every action follows what it needs.

    Walks the rows tick by tick, so the order is also close to the order in time.

    Args:
        schedule: any schedule.

    Returns:
        Every action of every row, once.

    Raises:
        ScheduleError: an action is missing, doubled, on the wrong device or before one that it
            needs, or the rows wait for each other forever; the message names device, tick and
            action and shows the rows around it.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> " ".join(map(str, execution_order(gpipe(2, 1))))
        '0F0 1F0 1B0 0B0'
    """
    return tuple(
        schedule.rows[device][tick] for moves in rounds(schedule) for device, tick in moves
    )


def validate(schedule: Schedule) -> Schedule:
    """Returns `schedule` if it is complete, ordered and free of deadlock.

    Complete: every stage does every microbatch's `F` once, and either its `B` once or its `I`
    and its `W` once each (a schedule without any backward action is a forward-only one), slice by
    slice if there are slices, and before them its `R` at most once.
    Ordered: every action follows what it needs. Free of deadlock: the rows can be run to their
    end, also if every transfer between devices is a *blocking rendezvous* (a send returns only
    when the receiver has posted the receive), with sends and receives placed by
    `insert_transfers`.

    Args:
        schedule: any schedule.

    Returns:
        The same schedule.

    Raises:
        ScheduleError: it is not; see `execution_order`.

    Example:
        >>> from pipemesh.schedule import Schedule
        >>> print(validate(Schedule.from_text("0F0 0F1 0B0 0B1")))
        0: 0F0 0F1 0B0 0B1
    """
    rounds(schedule)
    return schedule


def insert_transfers(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Returns the actions of each device with sends and receives, by the rule of this module."""
    table = compile_table(schedule)
    consumer = [-1] * table.num_codes
    for device, row in enumerate(table.waits):
        for source, far in zip(row, table.remote[device], strict=True):
            if far:
                consumer[source] = device
    steps: list[list[Step]] = [[] for _ in schedule.rows]
    for moves in rounds(schedule, table):
        for device, tick in moves:
            steps[device].append(schedule.rows[device][tick])
        for device, tick in moves:
            target = consumer[table.codes[device][tick]]
            if target >= 0:
                action = schedule.rows[device][tick]
                steps[device].append(Send(action, target))
                steps[target].append(Receive(action, device))
    return tuple(map(tuple, steps))
