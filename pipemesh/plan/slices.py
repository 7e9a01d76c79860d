"""The lengths of sequence slices that take the same work."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pipemesh.errors import PlanError
from pipemesh.schedule.names import EQUAL_WORK


class Span(NamedTuple):
    """The positions of a slice: its first one in the whole sequence, and how many that has."""

    begin: int
    whole: int


class Progress:
    """The share of a row's work that its first positions take, for any number of them.

    Args:
        work: the work of equal parts of a row, first to last, in any unit. The work is spread
            evenly inside a part.

    Example:
        >>> causal = Progress([1, 3])  # The second half attends to the first one, too.
        >>> causal.at(0.5), causal.where(0.5)
        (0.25, 0.6666666666666666)
    """

    def __init__(self, work: Sequence[float]) -> None:
        total = sum(work)
        if not total > 0:
            work, total = [1.0], 1.0
        self.shares = [0.0, *(done / total for done in itertools.accumulate(work))]

    @property
    def is_even(self) -> bool:
        """Returns whether all parts take the same, but for a percent."""
        steps = [b - a for a, b in itertools.pairwise(self.shares)]
        return max(steps) <= 1.01 * min(steps)

    def at(self, place: float) -> float:
        """Returns the share of the work of the first positions; `place` is their share of a row."""
        number, rest = divmod(min(place, 1.0) * (len(self.shares) - 1), 1)
        before = self.shares[int(number)]
        return before + rest * (self.shares[min(int(number) + 1, len(self.shares) - 1)] - before)

    def where(self, share: float) -> float:
        """Returns the share of a row whose work is a share of the row's; the inverse of `at`."""
        number = max(1, bisect.bisect_left(self.shares, share))
        number = min(number, len(self.shares) - 1)
        before, after = self.shares[number - 1 : number + 1]
        inside = (share - before) / (after - before) if after > before else 0.0
        return (number - 1 + min(1.0, inside)) / (len(self.shares) - 1)


def spans_of(lengths: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Returns where slices of some lengths begin and end, as shares of a row."""
    ends = [end / sum(lengths) for end in itertools.accumulate(lengths, initial=0)]
    return tuple(itertools.pairwise(ends))


def slice_shares(
    spans: Sequence[tuple[float, float]], layers: Sequence[tuple[float, Progress]]
) -> list[float]:
    """Returns the work of each slice as a multiple of their mean.

    Args:
        spans: where slices begin and end, as shares of a row.
        layers: the work of each layer on whole rows, in any unit, and how it grows along a row.
    """
    total = sum(work for work, _ in layers) / len(spans)
    if not total:
        return [1.0] * len(spans)
    return [sum(work * (p.at(b) - p.at(a)) for work, p in layers) / total for a, b in spans]


def equal_work_lengths(
    progress: Progress, length: int, num_slices: int, multiple: int = 1
) -> tuple[int, ...]:
    """Returns the lengths of slices of the same work, as close as whole multiples allow.

    Later slices of causal models are shorter, since each of their tokens attends to more (Sun et
    al., "Seq1F1B", 2024, computation-wise partitioning).

    Args:
        progress: the work along a row.
        length: positions of a row.
        num_slices: number of slices, at least 1.
        multiple: every length is a multiple of it, such as the devices that split positions.

    Returns:
        The positions of each slice, first to last; none is 0, and their sum is `length`.

    Raises:
        PlanError: the length is no multiple, or has fewer multiples than there are slices.

    Example:
        >>> equal_work_lengths(Progress([1, 3, 5, 7]), 1024, 4, multiple=8)
        (512, 208, 160, 144)
    """
    units, rest = divmod(length, multiple)
    if rest or units < num_slices:
        raise PlanError(
            f"seq1f1b:{num_slices}:{EQUAL_WORK} cuts sequences of {length} positions into "
            f"{num_slices} slices of whole multiples of {multiple}. Use "
            + (f"at most {units} slices" if not rest else f"a length that {multiple} divides")
            + (", or longer sequences" if not rest else "")
        )
    ends = [0]
    for number in range(1, num_slices):
        end = round(progress.where(number / num_slices) * units)
        # Each slice has at least one unit, as do those behind it.
        ends.append(min(max(end, ends[-1] + 1), units - num_slices + number))
    return tuple((b - a) * multiple for a, b in itertools.pairwise([*ends, units]))
