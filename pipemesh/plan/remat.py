"""Remat: the policy that decides which backward passes recompute their forward pass."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pipemesh.errors import PlanError
from pipemesh.mesh.checks import text_of
from pipemesh.schedule import Schedule
from pipemesh.text import nearest_text

NAMES = ("full", "none", "except_last", "twice")
"""The policies that have names; `custom` stands for a policy in Python."""
CUSTOM = "custom"

ModeName = Literal["full", "none", "twice"]
"""Recomputation of one backward pass: all once, nothing, or all once more in its `W`."""


@dataclasses.dataclass(frozen=True)
class Remat:
    """A policy of recomputation, for all stages or for each stage.

    `full` recomputes everything, `none` nothing. `twice` recomputes everything, and once more in a
    `W`. `except_last` is `none` where the backward pass directly follows the forward pass, else
    `full`. (In torchgpipe, the source of the name, that is the last microbatch.) `custom` is a
    policy in Python; forecasts treat it as `full`.

    Attributes:
        policies: one name for all stages, or one for each stage.

    Raises:
        PlanError: a policy is unknown.

    Example:
        >>> from pipemesh.schedule import gpipe
        >>> remat = Remat.from_text("except_last,twice")
        >>> remat.modes(gpipe(2, 2))
        {(0, 0): 'full', (0, 1): 'none', (1, 0): 'twice', (1, 1): 'twice'}
        >>> str(remat), Remat.from_text("none") == Remat.NONE
        ('except_last,twice', True)
    """

    policies: tuple[str, ...] = ("full",)

    FULL: ClassVar[Remat]
    NONE: ClassVar[Remat]
    CUSTOM: ClassVar[Remat]

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in (*NAMES, CUSTOM):
                raise PlanError(
                    f"remat is {str(self)!r}; {name!r} is no policy{nearest_text(name, NAMES)}"
                )

    @classmethod
    def from_text(cls, text: str) -> Remat:
        """Parses the name of a policy, or one name for each stage, separated by commas.

        Raises:
            PlanError: a policy is unknown.
        """
        return cls(tuple(text_of(text, PlanError, "full,none").split(",")))

    def __str__(self) -> str:
        """Returns the text that `from_text` parses."""
        return ",".join(self.policies)

    @property
    def is_full(self) -> bool:
        """Returns whether every backward pass recomputes everything once."""
        return {*self.policies} == {"full"}

    @property
    def is_none(self) -> bool:
        """Returns whether no backward pass recomputes anything."""
        return {*self.policies} == {"none"}

    @property
    def is_custom(self) -> bool:
        """Returns whether the policy of some stage exists in Python only."""
        return CUSTOM in self.policies

    def check_stages(self, num_stages: int) -> None:
        """Checks that the policy is for a number of stages.

        Raises:
            PlanError: it has policies for another number of stages.
        """
        number = len(self.policies)
        if number not in (1, num_stages):
            raise PlanError(
                f"remat is {str(self)!r}, which has {number} policies, but there are {num_stages} "
                "stages; give one policy for each stage, or one for all"
            )

    def modes(self, schedule: Schedule) -> dict[tuple[int, int], ModeName]:
        """Returns what the backward pass of each (stage, microbatch) recomputes.

        Args:
            schedule: a valid schedule.

        Raises:
            PlanError: the policy is for another number of stages.
        """
        self.check_stages(schedule.num_stages)
        names = self.policies * (schedule.num_stages if len(self.policies) == 1 else 1)
        at_once: frozenset[tuple[int, int]] = frozenset()
        if "except_last" in names:
            at_once = schedule.turns_at_once()

        def mode(stage: int, microbatch: int) -> ModeName:
            name = names[stage]
            if name == "none" or (name == "except_last" and (stage, microbatch) in at_once):
                return "none"
            return "twice" if name == "twice" else "full"

        return {
            (stage, microbatch): mode(stage, microbatch)
            for stage in range(schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
        }


Remat.FULL = Remat(("full",))
Remat.NONE = Remat(("none",))
Remat.CUSTOM = Remat((CUSTOM,))
