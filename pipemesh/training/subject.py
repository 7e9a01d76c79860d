"""The subject of a run: a lingvo task, its data, and the scores of its batches."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from pipemesh.plan import Plan


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
        """Returns the score of a batch of `amount` examples; `metrics` are those of `FPropTower`,
        of which all but pairs of a scalar and its weight are left out.
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


# Key of a one-hot vector with a batch's source, if sources train different weights.
SOURCE = "source_of_batch"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Held-out batches in memory for evaluation during the run, and their description."""

    batches: Sequence[Any]
    what: str

    def __str__(self) -> str:
        return self.what


class Subject(abc.ABC):
    """The model and data that a `Trainer` trains.

    A lingvo model only has to define a task and data. `RegisteredModel` takes both from a
    registered configuration.

    Attributes:
        name: name for titles.
        plan: the plan.
        device_type: `CPU` or `GPU`.
        seed: seed of TensorFlow's random numbers.
        unit: unit of `Score.amount`.
        read_ahead: number of training batches to prefetch.
        most_steps: the last step that the model itself sets; None for no limit.
        rate_name: name of the setting of the learning rate; None for the task's param.
        saves_frozen: whether checkpoints have the weights that are not trained; else these are in
            the run's first checkpoint.
        filters: the `filters` of `TrainedTask`, often none; known after `train_data`.
    """

    name: str
    plan: Plan
    device_type: str = "CPU"
    seed: int = 0
    unit: str = "examples"
    read_ahead: int = 0
    most_steps: int | None = None
    rate_name: str | None = None
    saves_frozen: bool = True
    filters: Sequence[str] = ()

    @abc.abstractmethod
    def task(self) -> Any:
        """Returns the params of the lingvo task."""

    def task_with_input(self, is_trained: bool) -> Any:
        """Returns the task's params with those of its training or held-out input, which some tasks
        read.
        """
        del is_trained
        return self.task()

    @abc.abstractmethod
    def train_data(self, epoch: int) -> tf.data.Dataset:
        """Returns an endless dataset of batches, from `epoch` on if the data differs by epoch.

        Raises:
            PipemeshError: the data cannot be read.
        """

    @abc.abstractmethod
    def heldout_data(self) -> Iterable[Any] | None:
        """Returns held-out batches of one epoch; None if there are none.

        Raises:
            PipemeshError: the data cannot be read.
        """

    def data_counts(self, heldout: bool = False) -> Sequence[Any]:
        """Returns numbers of the training data, or of the held-out data, a dataclass for each
        source; often none.
        """
        return ()

    def sample(self, batches: int) -> Sample:
        """Returns at most `batches` batches for evaluation during the run: by default the first
        held-out ones.
        """
        first = list(itertools.islice(self.heldout_data() or (), batches + 1))
        if len(first) <= batches:
            what = f"all of the held-out data, {len(first)} batches" if first else "none"
            return Sample(first, what)
        return Sample(first[:batches], f"the first {batches} held-out batches")

    def outcome(self, metrics: Mapping[str, Any], per_example: Mapping[str, Any]) -> Any:
        """Selects what `score` needs of the results of `FPropTower`: metrics, pairs of a scalar and
        its weight, and tensors with a row for each example. It is called while the graph is built.
        """
        del per_example
        return dict(metrics)

    def score(self, batch: Any, outcome: Any, loss: str) -> Score:
        """Returns the score of a batch from the result of `outcome`, as arrays, and the name of the
        trained metric.
        """
        return Means.of(outcome, loss, rows_of(batch))

    def nothing(self) -> Any:
        """Returns the score of no batch."""
        return Means()

    def batch_specs(self) -> Sequence[Any]:
        """Returns the shapes and dtypes of training batches, nested as these are, if they differ
        from batch to batch. The step has a graph for each, which is built before the first step.
        """
        return ()

    def input_shapes(self) -> Sequence[Any] | None:
        """Returns the shapes of the stack's inputs for one replica's part of a microbatch.

        Forecasts of memory, bytes and time need them; None if unknown.
        """
        return None

    def flops(self) -> float | None:
        """Returns the matmul flops of a step, forward and backward; None if unknown."""
        return None

    def note(self) -> Mapping[str, Any]:
        """Returns the settings of the weights that checkpoints store."""
        return {}

    def epilogue(self, score: Score, batches: Iterable[Any]) -> Iterator[str]:
        """Yields lines about the score of held-out batches at the end of a run."""
        del score, batches
        return iter(())


def rows_of(batch: Any) -> int:
    """Returns the number of examples in a batch: the length of its first tensor with a shape."""
    if isinstance(batch, Mapping):
        batch = {name: value for name, value in batch.items() if name != SOURCE}
    for leaf in tf.nest.flatten(batch):
        shape: Any = getattr(leaf, "shape", ())
        if len(shape):
            return int(shape[0])
    return 1
