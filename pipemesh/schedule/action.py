"""One cell of a schedule: an action, and the values that each kind of action takes and gives.

    kind                 takes                                          gives
    F  forward           outputs of the stage before                    outputs, kept
    R  recomputation     kept                                           remade
    B  full backward     kept or remade, grads of the stage after       grads
    I  input gradient    kept or remade, grads of the stage after       grads, pending
    W  weight gradient   pending

`EFFECTS` is this table. Validation, the simulator, transfers and the executor read it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipemesh.errors import ScheduleError
from pipemesh.schedule.checks import check_type

KINDS = "FBIWR"
# Nine digits are plenty, and keep hostile text from making huge numbers.
_TEXT = re.compile(rf"(\d{{1,9}})([{KINDS}])(\d{{1,9}})(?:\.(\d{{1,9}}))?", re.ASCII)
_PREFIX = re.compile(rf"(\d{{1,9}}([{KINDS}](\d{{1,9}}(\.(\d{{1,9}})?)?)?)?)?", re.ASCII)

OUTPUTS = "outputs"
"""Outputs of a stage, for the stage after it."""
KEPT = "kept"
"""Values of a forward pass that the backward pass of its stage needs; with an `R`, its inputs."""
REMADE = "remade"
"""Values that an `R` computes again for the backward pass of its stage."""
GRADS = "grads"
"""Gradients of the inputs of a stage, for the stage before it."""
PENDING = "pending"
"""Values that an `I` leaves for the `W` of its stage."""


class Value(NamedTuple):
    """A kind of value, made by the stage that lies `step` stages further on than the action's."""

    name: str
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Effect:
    """The values that actions of one kind take and give, in a schedule without `R`."""

    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    # Distance to the slice of the same microbatch that it needs, too; 0 for none.
    slice_step: int = 0

    def taken(self, is_recomputed: bool) -> tuple[Value, ...]:
        """Returns the values that it needs; an `R` replaces what the backward pass starts from."""
        if not is_recomputed or Value(REMADE) in self.gives:
            return self.takes
        return tuple(Value(REMADE) if value.name == KEPT else value for value in self.takes)

    @functools.cached_property
    def neighbour(self) -> Value | None:
        """The value that comes from another stage."""
        return next((value for value in self.takes if value.step), None)

    @functools.cached_property
    def begins_to_hold(self) -> bool:
        """Returns True if its device holds activations of the microbatch from its start on."""
        return not {Value(KEPT), Value(REMADE)}.isdisjoint(self.gives)

    @functools.cached_property
    def releases(self) -> bool:
        """Returns True if its device holds nothing of the microbatch once it has ended."""
        local = {Value(KEPT), Value(REMADE), Value(PENDING)}
        return not local.isdisjoint(self.takes) and local.isdisjoint(self.gives)


_BACKWARD = (Value(KEPT), Value(GRADS, 1))
EFFECTS: Mapping[str, Effect] = MappingProxyType(
    {
        "F": Effect((Value(OUTPUTS, -1),), (Value(OUTPUTS), Value(KEPT)), slice_step=-1),
        "B": Effect(_BACKWARD, (Value(GRADS),), slice_step=1),
        "I": Effect(_BACKWARD, (Value(GRADS), Value(PENDING)), slice_step=1),
        "W": Effect((Value(PENDING),), ()),
        "R": Effect((Value(KEPT),), (Value(REMADE),)),
    }
)
"""The table of this module, by kind of action."""


def makers(name: str) -> str:
    """Returns the kinds of action that give a value: `BI` for `GRADS`."""
    return "".join(kind for kind in KINDS if Value(name) in EFFECTS[kind].gives)


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
        """Returns the microbatch, and the slice if there is one, as in the action's text."""
        return str(self.microbatch) if self.slice is None else f"{self.microbatch}.{self.slice}"

    def also(self, kind: str, step: int = 0) -> Action:
        """Returns another kind of action for the same piece, `step` stages further on.

        Example:
            >>> str(Action(2, "F", 0).also("B", 1))
            '3B0'
        """
        return Action(self.stage + step, kind, self.microbatch, self.slice)

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Parses what `str` prints: stage, kind and microbatch, then with a point the slice if any.

        Raises:
            ScheduleError: `text` is something else; the message points at the first column
                that does not fit.
        """
        match = _TEXT.fullmatch(check_type("an action's text", text, str))
        if match is None:
            raise ScheduleError(
                f"column {misfit(text) + 1}: {text!r} is not an action; write stage, kind "
                f"(one of {KINDS}) and microbatch, for example '2F0', or '2F0.1' with a slice"
            )
        return cls(int(match[1]), match[2], int(match[3]), int(match[4]) if match[4] else None)


def needs(
    action: Action,
    num_stages: int,
    split: Container[tuple[int, int]] = (),
    num_slices: int = 1,
) -> tuple[Action, ...]:
    """Returns the actions whose results `action` consumes, at most three and without its `R`."""
    # `split` holds the (stage, microbatch) pairs whose backward is an `I` and a `W`.

    def maker(name: str, stage: int) -> str:
        kinds = makers(name)
        return kinds if kinds != "BI" else "BI"[(stage, action.microbatch) in split]

    effect = EFFECTS[action.kind]
    needed = [
        action.also(maker(name, stage), step)
        for name, step in effect.takes
        if 0 <= (stage := action.stage + step) < num_stages
    ]
    if action.slice is not None and effect.slice_step:
        neighbour = action.slice + effect.slice_step
        if 0 <= neighbour < max(num_slices, action.slice):
            kind = maker(effect.gives[0].name, action.stage)
            needed.append(dataclasses.replace(action, kind=kind, slice=neighbour))
    return tuple(needed)


def misfit(text: str) -> int:
    """Returns the index of the first character at which `text` stops being an action."""
    match = _PREFIX.match(text)
    assert match is not None  # No part has to be there.
    return match.end()


def parse_cell(text: str, line: int, start: int) -> Action:
    """Parses an action at index `start` of line `line`; errors name line and column."""
    try:
        return Action.from_text(text)
    except ScheduleError as error:
        reason = str(error).partition(": ")[2]
        raise ScheduleError(f"line {line}, column {start + misfit(text) + 1}: {reason}") from None
