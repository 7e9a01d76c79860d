"""The options of a partition, and checks of single values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from pipemesh.errors import PartitionError
from pipemesh.partition.costs import number_problem
from pipemesh.partition.flights import at_once, in_flight
from pipemesh.text import nearest

METHODS = ("exact", "lingvo", "uniform")

CONSTRAINTS = ("memory_limit", "same_stage", "fixed", "min_layers", "max_layers")
"""Options that forbid cuts."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asks for; the fields are the arguments of `partition`, described there.

    `schedule` is `None` where a table's numbers stand for it. `placement` is empty if the stages go
    round the devices. `fixed` is split: what is given as a mapping is `pinned`.
    """

    num_stages: int
    speeds: tuple[float, ...] | None = None
    bandwidth: float | None = None
    overlap_transfers: bool = False
    memory_limit: float | None = None
    schedule: str | None = "one_f_one_b"
    in_flight: tuple[int, ...] | None = None
    at_once: tuple[Fraction, ...] | None = None
    placement: tuple[int, ...] = ()
    num_microbatches: int | None = None
    optimizer_bytes_per_parameter_byte: float = 2.0
    remat: str = "none"
    num_virtual_stages: int = 1
    same_stage: tuple[tuple[int, ...], ...] = ()
    min_layers: int = 1
    max_layers: int | None = None
    fixed: tuple[int, ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices the stages run on."""
        return max(self.stage_devices) + 1

    @property
    def stage_devices(self) -> tuple[int, ...]:
        """For each stage its device."""
        return self.placement or round_robin(self.num_stages, self.num_virtual_stages)

    def flights(self) -> tuple[int, ...] | None:
        """Microbatches in flight on each stage, or `None` if nothing says how many."""
        if self.in_flight is not None or self.schedule is None or self.num_microbatches is None:
            return self.in_flight
        return in_flight(
            self.schedule, self.num_microbatches, self.num_stages, self.num_virtual_stages
        )

    def recomputed(self) -> tuple[Fraction, ...]:
        """The share of forward passes that each stage runs a second time."""
        if self.remat == "none":
            return (Fraction(0),) * self.num_stages
        if self.remat == "full":
            return (Fraction(1),) * self.num_stages
        if self.at_once is not None:
            assert self.num_microbatches is not None
            return tuple(1 - count / self.num_microbatches for count in self.at_once)
        assert self.schedule is not None
        shares = at_once(
            self.schedule, self.num_microbatches, self.num_stages, self.num_virtual_stages
        )
        return tuple(1 - share for share in shares)

    def without(self, constraint: str) -> Options:
        """Drops one constraint.

        Args:
            constraint: one of `CONSTRAINTS`, or `"bandwidth"`.

        Returns:
            Options that allow more cuts.
        """
        if constraint == "fixed":
            return dataclasses.replace(self, fixed=(), pinned=())
        free: dict[str, Any] = {"same_stage": (), "min_layers": 1}
        return dataclasses.replace(self, **{constraint: free.get(constraint)})

    def active(self) -> tuple[str, ...]:
        """The constraints that were given.

        Returns:
            Names out of `CONSTRAINTS`.
        """
        given = {
            "memory_limit": self.memory_limit is not None,
            "same_stage": bool(self.same_stage),
            "fixed": bool(self.fixed or self.pinned),
            "min_layers": self.min_layers > 1,
            "max_layers": self.max_layers is not None,
        }
        return tuple(name for name in CONSTRAINTS if given[name])


def round_robin(num_stages: int, num_virtual_stages: int) -> tuple[int, ...]:
    """For each stage its device, where the stages go round the devices.

    Example:
        >>> round_robin(6, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_stages // num_virtual_stages)) * num_virtual_stages


def choice(name: str, value: object, known: Sequence[str]) -> str:
    """Checks a word.

    Args:
        name: of the option.
        value: what was given.
        known: what is allowed.

    Returns:
        The word.

    Raises:
        PartitionError: it is not allowed; the message suggests the nearest word.
    """
    if isinstance(value, str) and value in known:
        return value
    near = nearest(str(value), known)
    hint = f"; did you mean {near!r}?" if near else ""
    raise PartitionError(f"{name} is {value!r}, but must be one of {', '.join(known)}{hint}")


def positive(name: str, value: object, zero: bool = False) -> float:
    """Checks a number above zero.

    Args:
        name: of the option.
        value: what was given.
        zero: whether zero is allowed too.

    Returns:
        The number.

    Raises:
        PartitionError: it is no finite number or not above zero.
    """
    if number_problem(value) or (not zero and float(value) == 0):  # type: ignore[arg-type]
        bound = "zero or more" if zero else "above zero"
        raise PartitionError(f"{name} is {value!r}, but must be a finite number {bound}")
    return float(value)  # type: ignore[arg-type]
