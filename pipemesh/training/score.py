"""What predictions cost: scores of batches that add up to that of a whole dataset."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Score(Protocol):
    """What predicting a batch, or several, cost."""

    @property
    def amount(self) -> float:
        """How much was predicted, in the units that speed is told in."""
        ...

    @property
    def judged(self) -> float:
        """What weights are judged by, less is better; not finite if they are no good."""
        ...

    def values(self) -> Mapping[str, float]:
        """By name, what is written as summaries."""
        ...

    def short(self) -> str:
        """What a line of progress has room for; "" if nothing."""
        ...

    def __add__(self, other: Any, /) -> Any:
        """The score of both."""
        ...


@dataclasses.dataclass(frozen=True)
class Means:
    """Weighted means of a lingvo task's metrics.

    Attributes:
        sums: by name, the sum of values times their weights, and the sum of the weights.
        loss: which of them weights are judged by.
        amount: examples.

    Example:
        >>> one = Means.of({"loss": (2.0, 3.0), "accuracy": (0.5, 3.0)}, "loss", 3)
        >>> both = one + Means.of({"loss": (4.0, 1.0), "accuracy": (1.0, 1.0)}, "loss", 1)
        >>> print(both)
        loss 2.500, accuracy 0.625
    """

    sums: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    loss: str = "loss"
    amount: float = 0.0

    @classmethod
    def of(cls, metrics: Mapping[str, tuple[Any, Any]], loss: str, amount: float) -> Means:
        """The score of a batch.

        Args:
            metrics: by name a scalar and its weight, as `FPropTower` returns them; others are left
                out.
            loss: which of them weights are judged by.
            amount: examples in the batch.
        """
        sums = {}
        for name, (value, weight) in metrics.items():
            if np.size(value) == 1 and np.size(weight) == 1:
                held = float(np.reshape(weight, []))
                # What nothing was weighed for may be anything.
                total = float(np.reshape(value, [])) * held if held else 0.0
                sums[name] = (total, held)
        return cls(sums, loss, amount)

    @property
    def judged(self) -> float:
        """The mean loss; of what has no weight 0, as there is nothing to object to."""
        total, weight = self.sums.get(self.loss, (math.nan, 1.0))
        return total / weight if weight else total

    def values(self) -> dict[str, float]:
        """The mean of each metric; not a number if nothing was weighed for it."""
        return {name: ratio(total, weight) for name, (total, weight) in self.sums.items()}

    def short(self) -> str:
        """All but the loss."""
        return _told({name: v for name, v in self.values().items() if name != self.loss})

    def __str__(self) -> str:
        return _told(self.values())

    def __add__(self, other: Means) -> Means:
        if not self.sums:
            return other
        sums = {
            name: tuple(np.add(self.sums.get(name, (0.0, 0.0)), other.sums.get(name, (0.0, 0.0))))
            for name in {**self.sums, **other.sums}
        }
        return Means(sums, self.loss, self.amount + other.amount)


def ratio(amount: float, count: float) -> float:
    """`amount` for each of `count`; not a number for none."""
    return amount / count if count else math.nan


def _told(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
