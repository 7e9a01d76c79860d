"""Proves a schedule complete, ordered and free of deadlock, and gives its execution order."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from pipemesh.schedule.action import Action
from pipemesh.schedule.communication import check_rendezvous, insert_transfers
from pipemesh.schedule.simulate import rounds
from pipemesh.schedule.schedule import Schedule


def needs(
    action: Action,
    num_stages: int,
    split: Container[tuple[int, int]] = (),
    num_slices: int = 1,
) -> tuple[Action, ...]:
    """The actions whose results `action` consumes.

    Args:
        action: any action.
        num_stages: how many stages the schedule has.
        split: the `(stage, microbatch)` pairs whose backward is split into `I` and `W`; only
            looked at for the stage that `action`'s gradient comes from, and for the slices
            after `action`'s.
        num_slices: into how many slices sequences are cut.

    Returns:
        At most three actions; that a backward comes after its `R`, if there is one, is not said.

    Example:
        >>> [str(a) for a in needs(Action(0, "B", 3), num_stages=2)]
        ['0F3', '1B3']
        >>> [str(a) for a in needs(Action(0, "I", 3), num_stages=2, split={(1, 3)})]
        ['0F3', '1I3']
        >>> [str(a) for a in needs(Action(0, "W", 3), num_stages=2)]
        ['0I3']
        >>> [str(a) for a in needs(Action(1, "F", 3, 1), num_stages=2)]
        ['0F3.1', '1F3.0']
        >>> [str(a) for a in needs(Action(1, "B", 3, 0), num_stages=2, num_slices=2)]
        ['1F3.0', '1B3.1']
    """
    if action.kind == "F":
        before = (action.also("F", -1),) if action.stage else ()
        if action.slice:
            before = (*before, dataclasses.replace(action, slice=action.slice - 1))
        return before
    if action.kind == "W":
        return (action.also("I"),)
    own = (action.also("F"),)
    if action.kind == "R":
        return own
    if action.stage < num_stages - 1:
        kind = "I" if (action.stage + 1, action.microbatch) in split else "B"
        own = (*own, action.also(kind, 1))
    if action.slice is not None and action.slice + 1 < num_slices:
        kind = "I" if (action.stage, action.microbatch) in split else "B"
        own = (*own, dataclasses.replace(action, kind=kind, slice=action.slice + 1))
    return own


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
