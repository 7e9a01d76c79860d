"""Scores of batches, which add up to the score of a dataset."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Score(Protocol):
    """The score of one or more batches."""

    @property
    def amount(self) -> float:
        """Returns the amount of predicted data, in the unit of the reported speed."""
        ...

    @property
    def judged(self) -> float:
        """Returns the value that ranks weights, lower is better; not finite for bad weights."""
        ...

    def values(self) -> Mapping[str, float]:
        """Returns the values for summaries, by name."""
        ...

    def short(self) -> str:
        """Returns short text for the progress line, or ""."""
        ...

    def __add__(self, other: Any, /) -> Any:
        """Returns the score of both."""
        ...


@dataclasses.dataclass(frozen=True)
class Means:
    """Weighted means of a lingvo task's metrics.

    Attributes:
        sums: by name, the weighted sum of values, and the sum of weights.
        loss: the metric that ranks weights.
        amount: number of examples.

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
        """Returns the score of a batch.

        Args:
            metrics: by name a scalar and its weight, as `FPropTower` returns them; others are left
                out.
            loss: the metric that ranks weights.
            amount: examples in the batch.
        """
        sums = {}
        for name, (value, weight) in metrics.items():
            if np.size(value) == 1 and np.size(weight) == 1:
                held = float(np.reshape(weight, []))
                # A value with weight 0 may be anything, even NaN.
                total = float(np.reshape(value, [])) * held if held else 0.0
                sums[name] = (total, held)
        return cls(sums, loss, amount)

    @property
    def judged(self) -> float:
        """Returns the mean loss; 0 without any weight, so that such weights count as good."""
        total, weight = self.sums.get(self.loss, (math.nan, 1.0))
        return total / weight if weight else total

    def values(self) -> dict[str, float]:
        """Returns the mean of each metric; NaN for a total weight of 0."""
        return {name: ratio(total, weight) for name, (total, weight) in self.sums.items()}

    def short(self) -> str:
        """Returns all metrics but the loss as text."""
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
    """Returns `amount / count`; NaN if `count` is 0."""
    return amount / count if count else math.nan


def _told(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
