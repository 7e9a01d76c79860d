"""Who waits for which action of whom, of what is known of the devices of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from pipemesh.schedule import Action, Schedule
from pipemesh.schedule.action import needs


@dataclasses.dataclass(frozen=True)
class Stand:
    """How far a device has come in a step.

    Attributes:
        name: of the device.
        row: the row of the schedule that its home runs.
        actions: those of the row that it has a part in, in order.
        started: how many of them have begun.
        ended: how many of them are done.
        is_silent: whether it did not answer, so that it may be further.
    """

    name: str
    row: int
    actions: tuple[Action, ...]
    started: int
    ended: int
    is_silent: bool = False


@dataclasses.dataclass(frozen=True)
class Wait:
    """What a device that is not done is about.

    Attributes:
        stand: how far it has come.
        action: what it is about, or waits to begin.
        has_begun: whether it has begun it.
        missing: what that needs and what is not done, with the devices that are to do it.
    """

    stand: Stand
    action: Action
    has_begun: bool
    missing: tuple[tuple[Action, tuple[str, ...]], ...]

    def __str__(self) -> str:
        return self.told()

    def told(self, name: Callable[[str], str] = str) -> str:
        """It as a line.

        Args:
            name: what a device is called.
        """
        at = f"{name(self.stand.name)}: "
        if self.stand.is_silent:
            return f"{at}does not answer, in {self.action} or later"
        told = " and ".join(
            f"{action} of {', '.join(map(name, who))}" for action, who in self.missing
        )
        if self.has_begun:
            # What is computed again is so before the gradient arrives.
            return f"{at}in {self.action}" + (f", waits for {told}" if told else "")
        return f"{at}waits to begin {self.action}, for {told or 'what it needs to arrive'}"


def waits_of(schedule: Schedule, stands: Sequence[Stand]) -> list[Wait]:
    """What each device is about that is not done.

    What somebody has done had what it needs, so of a device that does not answer as much is known
    as others have used of it.

    Args:
        schedule: what is run.
        stands: of all devices.

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
    """All that must be done, as somebody has begun what needs it."""
    order = {
        row: {a: i for i, a in enumerate(actions)} for row, actions in enumerate(schedule.rows)
    }
    todo = [a for stand in stands for a in stand.actions[: stand.ended]]
    # Who has begun a forward pass has what it needs. One backward may compute again first.
    begun = [a for stand in stands for a in stand.actions[stand.ended : stand.started]]
    todo += [a for a in begun if a.kind in "FW"]
    found: set[Action] = set()
    while todo:
        action = todo.pop()
        for each in needs(action, schedule.num_stages, split, schedule.num_slices):
            if each in found:
                continue
            # Its home has done what stands before it, too.
            row = order[next(r for r, places in order.items() if each in places)]
            before = [a for a, place in row.items() if place <= row[each] and a not in found]
            found.update(before)
            todo += before
    return found


def _ended(stand: Stand, known: set[Action]) -> int:
    done = [i + 1 for i, action in enumerate(stand.actions) if action in known]
    return max([stand.ended, *done])
