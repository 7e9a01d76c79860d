"""One cell of a schedule: what a device does to one microbatch of one stage."""

from __future__ import annotations

import dataclasses
import operator
import re

from pipemesh.errors import ScheduleError
from pipemesh.schedule.checks import check_type

KINDS = "FBIWR"
# Nine digits are plenty, and keep hostile text from making huge numbers.
_TEXT = re.compile(rf"(\d{{1,9}})([{KINDS}])(\d{{1,9}})(?:\.(\d{{1,9}}))?", re.ASCII)
_PARTS = (r"\d{1,9}", f"[{KINDS}]", r"\d{1,9}", r"\.", r"\d{1,9}")
_PREFIXES = tuple("".join(_PARTS[:length]) for length in range(len(_PARTS), 0, -1))


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """A forward or backward pass of one microbatch, or of a slice of it, through one stage.

    Attributes:
        stage: index of the stage, from 0.
        kind: `F` forward, `B` full backward, `I` input gradient, `W` weight gradient, `R`
            recomputation of what the backward needs and `F` has not kept.
        microbatch: index of the microbatch, from 0.
        slice: index of the part of the sequences, from 0; None for whole sequences.

    Example:
        >>> str(Action(stage=2, kind="F", microbatch=0))
        '2F0'
        >>> Action.from_text("2F0").stage
        2
        >>> Action.from_text("2F0.1").slice
        1
    """

    stage: int
    kind: str
    microbatch: int
    slice: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS or len(self.kind) != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ScheduleError(f"action kind is {self.kind!r}; allowed are {', '.join(KINDS)}")
        try:
            least = min(map(operator.index, (self.stage, self.microbatch, self.slice or 0)))
        except TypeError:
            least = -1
        if least < 0:
            slice_ = "" if self.slice is None else f", slice {self.slice!r}"
            raise ScheduleError(
                f"stage {self.stage!r}, microbatch {self.microbatch!r}{slice_} must be whole "
                "numbers from 0 on"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.piece_text}"

    @property
    def piece_text(self) -> str:
        """The microbatch, and the slice if there is one, as in the action's text.

        Example:
            >>> Action(2, "F", 0, 1).piece_text
            '0.1'
        """
        return str(self.microbatch) if self.slice is None else f"{self.microbatch}.{self.slice}"

    def also(self, kind: str, step: int = 0) -> Action:
        """Another kind of action for the same microbatch and slice, `step` stages further on.

        Example:
            >>> str(Action(2, "F", 0).also("B", 1))
            '3B0'
        """
        return dataclasses.replace(self, kind=kind, stage=self.stage + step)

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Parses what `str` prints.

        Args:
            text: a stage, a kind and a microbatch without blanks, such as `2F0`; for a slice
                with a point and its index after them, such as `2F0.1`.

        Returns:
            The action.

        Raises:
            ScheduleError: `text` is something else; the message points at the first column
                that does not fit.

        Example:
            >>> Action.from_text("1W3")
            Action(stage=1, kind='W', microbatch=3, slice=None)
        """
        match = _TEXT.fullmatch(check_type("an action's text", text, str))
        if match is None:
            raise ScheduleError(
                f"column {misfit(text) + 1}: {text!r} is no action; write stage, kind "
                f"(one of {KINDS}) and microbatch, for example '2F0', or '2F0.1' with a slice"
            )
        return cls(int(match[1]), match[2], int(match[3]), int(match[4]) if match[4] else None)


def misfit(text: str) -> int:
    """The index of the first character at which `text` stops being an action.

    Example:
        >>> misfit("2X0")
        1
    """
    for pattern in _PREFIXES:
        match = re.match(pattern, text, re.ASCII)
        if match is not None:
            return match.end()
    return 0


def parse_cell(text: str, line: int, start: int) -> Action:
    """Parses one action that begins at index `start` of line `line`.

    Raises:
        ScheduleError: with the line and the column, both from 1, of the first misfit.

    Example:
        >>> str(parse_cell("2F0", line=1, start=3))
        '2F0'
    """
    try:
        return Action.from_text(text)
    except ScheduleError as error:
        reason = str(error).partition(": ")[2]
        raise ScheduleError(f"line {line}, column {start + misfit(text) + 1}: {reason}") from None
