"""Steady states of schedules: runs of actions that repeat with other microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from pipemesh.schedule.action import Action

# Fewer repetitions than this are not worth a loop.
_MIN_COUNT = 3


@dataclasses.dataclass(frozen=True)
class Loop:
    """Actions that repeat.

    Attributes:
        body: the actions of the first repetition.
        count: the number of repetitions.
        shift: the number added to every microbatch from one repetition to the next; not 0.
    """

    body: tuple[Action, ...]
    count: int
    shift: int


def find_loops(
    order: Sequence[Action], label: Callable[[Action], Hashable] = lambda action: None
) -> tuple[Action | Loop, ...]:
    """Writes an order of actions with its repetitions as loops, which written out give it back.

    The length of the result depends on the number of stages, not of microbatches, if the schedule
    has a steady state. Actions are alike only if their `label` is.

    Example:
        >>> from pipemesh.schedule import execution_order, gpipe
        >>> loops = find_loops(execution_order(gpipe(2, 100)))
        >>> [str(item) if isinstance(item, Action) else item.count for item in loops]
        ['0F0', 99, '1F99', 100]
    """
    ids: dict[Hashable, int] = {}
    kinds = [ids.setdefault((a.kind, a.stage, a.slice, label(a)), len(ids)) for a in order]
    microbatches = [action.microbatch for action in order]
    places: dict[int, list[int]] = {}
    rank: list[int] = []
    for place, kind in enumerate(kinds):
        same = places.setdefault(kind, [])
        rank.append(len(same))
        same.append(place)
    items: list[Action | Loop] = []
    begin = 0
    while begin < len(order):
        best: Loop | None = None
        following = places[kinds[begin]][rank[begin] + 1 :]
        # A period longer than this could not be repeated often enough.
        longest = (len(order) - begin) // _MIN_COUNT
        for other in following:
            length = other - begin
            if length > longest or (best is not None and length > len(best.body) * best.count):
                break
            count = _count(kinds, microbatches, begin, length)
            if count >= _MIN_COUNT and (best is None or count * length > size(best)):
                shift = microbatches[other] - microbatches[begin]
                best = Loop(tuple(order[begin : begin + length]), count, shift)
        if best is None:
            items.append(order[begin])
            begin += 1
        else:
            items.append(best)
            begin += size(best)
    return tuple(items)


def size(loop: Loop) -> int:
    """Returns the number of actions that a loop stands for."""
    return len(loop.body) * loop.count


def _count(kinds: Sequence[int], microbatches: Sequence[int], begin: int, length: int) -> int:
    """Returns how often the `length` actions from `begin` on repeat."""
    shift = microbatches[begin + length] - microbatches[begin]
    if shift == 0:
        return 1
    place = begin
    while (
        place + length < len(kinds)
        and kinds[place] == kinds[place + length]
        and microbatches[place] + shift == microbatches[place + length]
    ):
        place += 1
    return 1 + (place - begin) // length
