"""Proves a schedule complete, ordered and free of deadlock, and gives its execution order."""

from __future__ import annotations

from pipemesh.schedule.action import Action
from pipemesh.schedule.communication import check_rendezvous, insert_transfers
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import rounds


def execution_order(schedule: Schedule) -> tuple[Action, ...]:
    """All actions in an order in which every action follows what it needs.

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
    `pipemesh.schedule.communication.insert_transfers`.

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
    check_rendezvous(insert_transfers(schedule))
    return schedule
