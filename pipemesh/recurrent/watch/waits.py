"""Finds which device waits for which action."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pipemesh.schedule import Action, Schedule
from pipemesh.schedule.action import needs


@dataclasses.dataclass(frozen=True)
class Stand:
    """The progress of a device in a step.

    Attributes:
        name: of the device.
        row: the row of the schedule that its home runs.
        actions: the actions of the row that it takes part in, in order.
        started: number of started actions.
        ended: number of finished actions.
        is_silent: True if it did not answer, so that it may have come further.
    """

    name: str
    row: int
    actions: tuple[Action, ...]
    started: int
    ended: int
    is_silent: bool = False


@dataclasses.dataclass(frozen=True)
class Wait:
    """The current action of an unfinished device.

    Attributes:
        stand: the progress of the device.
        action: the current action, or the next one.
        has_begun: True if it has started the action.
        missing: the unfinished actions that it needs, with their devices.
    """

    stand: Stand
    action: Action
    has_begun: bool
    missing: tuple[tuple[Action, tuple[str, ...]], ...]

    def __str__(self) -> str:
        return self.told()

    def told(self, name: Callable[[str], str] = str) -> str:
        """Returns the wait as a line; `name` maps a device to the name to print."""
        at = f"{name(self.stand.name)}: "
        if self.stand.is_silent:
            return f"{at}does not answer, in {self.action} or later"
        told = " and ".join(
            f"{action} of {', '.join(map(name, who))}" for action, who in self.missing
        )
        if self.has_begun:
            # Recomputation runs before the gradient arrives.
            return f"{at}in {self.action}" + (f", waits for {told}" if told else "")
        return f"{at}waits to begin {self.action}, for {told or 'what it needs to arrive'}"


def waits_of(schedule: Schedule, stands: Sequence[Stand]) -> list[Wait]:
    """Returns the current action of each unfinished device.

    Inputs of a finished action must exist. So for a device that does not answer, actions whose
    results others have used count as finished.

    Example:
        >>> from pipemesh.schedule import one_f_one_b
        >>> schedule = one_f_one_b(2, 1)
        >>> stands = [Stand("a", 0, schedule.rows[0], 1, 1), Stand("b", 1, schedule.rows[1], 1, 0)]
        >>> print(*waits_of(schedule, stands), sep="\\n")
        a: waits to begin 0B0, for 1B0 of b
        b: in 1F0
    """
    split = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "I"}
    known = _used(schedule, stands, split)
    stands = [dataclasses.replace(stand, ended=_ended(stand, known)) for stand in stands]
    lacking: dict[Action, list[str]] = {}
    for stand in stands:
        for action in stand.actions[stand.ended :]:
            lacking.setdefault(action, []).append(stand.name)
    return [
        _wait(stand, schedule, split, lacking)
        for stand in stands
        if stand.ended < len(stand.actions)
    ]


def _wait(
    stand: Stand,
    schedule: Schedule,
    split: set[tuple[int, int]],
    lacking: Mapping[Action, Sequence[str]],
) -> Wait:
    action = stand.actions[stand.ended]
    needed = needs(action, schedule.num_stages, split, schedule.num_slices)
    missing = [(each, tuple(lacking[each])) for each in needed if each in lacking]
    return Wait(stand, action, stand.started > stand.ended, tuple(missing))


def _used(schedule: Schedule, stands: Sequence[Stand], split: set[tuple[int, int]]) -> set[Action]:
    """Returns all actions that must be finished, because an action that needs them has started."""
    order = {
        row: {a: i for i, a in enumerate(actions)} for row, actions in enumerate(schedule.rows)
    }
    todo = [a for stand in stands for a in stand.actions[: stand.ended]]
    # A started forward pass has its inputs. A started backward pass may still recompute.
    begun = [a for stand in stands for a in stand.actions[stand.ended : stand.started]]
    todo += [a for a in begun if a.kind in "FW"]
    found: set[Action] = set()
    while todo:
        action = todo.pop()
        for each in needs(action, schedule.num_stages, split, schedule.num_slices):
            if each in found:
                continue
            # Its home has finished the earlier actions, too.
            row = order[next(r for r, places in order.items() if each in places)]
            before = [a for a, place in row.items() if place <= row[each] and a not in found]
            found.update(before)
            todo += before
    return found


def _ended(stand: Stand, known: set[Action]) -> int:
    done = [i + 1 for i, action in enumerate(stand.actions) if action in known]
    return max([stand.ended, *done])
