"""The subject of a run: a lingvo task, its data and its evaluation."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.plan import Plan
from pipemesh.training.score import Means, Score

# Key of a one-hot vector with a batch's source, if sources train different weights.
SOURCE = "source_of_batch"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Held-out batches in memory, for evaluation during the run.

    Attributes:
        batches: nested tensors or arrays.
        what: their description for people.
    """

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
    """

    name: str
    plan: Plan
    device_type: str = "CPU"
    seed: int = 0
    unit: str = "examples"
    read_ahead: int = 0
    most_steps: int | None = None
    rate_name: str | None = None

    @abc.abstractmethod
    def task(self) -> Any:
        """Returns the params of the lingvo task."""

    def task_with_input(self, is_trained: bool) -> Any:
        """Returns the task's params with those of its input, which some tasks read.

        Args:
            is_trained: whether the input is for training, or held out.
        """
        del is_trained
        return self.task()

    @abc.abstractmethod
    def train_data(self, epoch: int) -> tf.data.Dataset:
        """Returns an endless dataset of batches.

        Args:
            epoch: number of the first epoch, if the data differs by epoch.

        Raises:
            PipemeshError: the data cannot be read.
        """

    @abc.abstractmethod
    def heldout_data(self) -> Iterable[Any] | None:
        """Returns held-out batches of one epoch; None if there are none.

        Raises:
            PipemeshError: the data cannot be read.
        """

    def variable_filters(self) -> Sequence[str]:
        """Returns the `filters` of `TrainedTask`, often none; call it after `train_data`."""
        return ()

    def sample(self, batches: int) -> Sample:
        """Returns batches for evaluation during the run: by default the first held-out ones.

        Args:
            batches: the largest number of batches.
        """
        found = list(itertools.islice(self.heldout_data() or (), batches + 1))
        if len(found) <= batches:
            what = f"all of the held-out data, {len(found)} batches" if found else "none"
            return Sample(found, what)
        return Sample(found[:batches], f"the first {batches} held-out batches")

    def outcome(self, metrics: Mapping[str, Any], per_example: Mapping[str, Any]) -> Any:
        """Selects the results of a step that `score` needs; called while the graph is built.

        Args:
            metrics: the metrics from `FPropTower`, pairs of a scalar and its weight.
            per_example: the tensors from `FPropTower` with one row for each example.
        """
        del per_example
        return dict(metrics)

    def score(self, batch: Any, outcome: Any, loss: str) -> Score:
        """Returns the score of a batch.

        Args:
            batch: the batch.
            outcome: the result of `outcome`, as arrays.
            loss: name of the trained metric.
        """
        return Means.of(outcome, loss, rows_of(batch))

    def nothing(self) -> Any:
        """Returns the score of no batch."""
        return Means()

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
        """Yields lines about the score at the end of a run.

        Args:
            score: score of the batches.
            batches: the held-out batches.
        """
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
