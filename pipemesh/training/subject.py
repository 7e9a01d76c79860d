"""What is trained: a task of lingvo, its data, and what it is judged by."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.plan import Plan
from pipemesh.training.score import Means, Score

# Of a batch whose sources do not all train the same weights: which one it is of, a one-hot vector.
SOURCE = "source_of_batch"


@dataclasses.dataclass(frozen=True)
class Sample:
    """Held-out batches in memory, to judge by while training.

    Attributes:
        batches: nested tensors or arrays.
        what: they are, for whoever reads of them.
    """

    batches: Sequence[Any]
    what: str

    def __str__(self) -> str:
        return self.what


class Subject(abc.ABC):
    """What a `Trainer` trains.

    A model of lingvo needs a task and data alone; `RegisteredModel` has both from a registered
    configuration.

    Attributes:
        name: for titles.
        plan: how it is run.
        device_type: what it runs on, `CPU` or `GPU`.
        seed: of TensorFlow's random numbers.
        unit: what `Score.amount` counts.
        read_ahead: how many batches the training data reads before they are asked for.
        most_steps: up to which step the model itself is to be trained; None if it does not say.
        rate_name: what says how large the learning rate is; None for the param of the task.
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
        """Params of the lingvo task."""

    def task_with_input(self, is_trained: bool) -> Any:
        """The same with the params of its input, which some tasks look at.

        Args:
            is_trained: whether that is trained on, or held out.
        """
        del is_trained
        return self.task()

    @abc.abstractmethod
    def train_data(self, epoch: int) -> tf.data.Dataset:
        """Batches without end.

        Args:
            epoch: the number of the first epoch, if data differs by it.

        Raises:
            PipemeshError: the data cannot be read.
        """

    @abc.abstractmethod
    def heldout_data(self) -> Iterable[Any] | None:
        """Held-out batches, one epoch; None if there are none.

        Raises:
            PipemeshError: the data cannot be read.
        """

    def variable_filters(self) -> Sequence[str]:
        """The `filters` of `TrainedTask`, once there is training data; most data has none."""
        return ()

    def sample(self, batches: int) -> Sample:
        """What to judge by while training: the first batches, unless a model knows better.

        Args:
            batches: at most so many.
        """
        found = list(itertools.islice(self.heldout_data() or (), batches + 1))
        if len(found) <= batches:
            what = f"all of the held-out data, {len(found)} batches" if found else "none"
            return Sample(found, what)
        return Sample(found[:batches], f"the first {batches} held-out batches")

    def outcome(self, metrics: Mapping[str, Any], per_example: Mapping[str, Any]) -> Any:
        """What of a step's results is handed to `score`; called while the graph is built.

        Args:
            metrics: that `FPropTower` returned, pairs of a scalar and its weight.
            per_example: that it returned, a row for each example.
        """
        del per_example
        return dict(metrics)

    def score(self, batch: Any, outcome: Any, loss: str) -> Score:
        """The score of a batch.

        Args:
            batch: that was given.
            outcome: what `outcome` returned, as arrays.
            loss: the metric that is trained on.
        """
        return Means.of(outcome, loss, rows_of(batch))

    def nothing(self) -> Any:
        """The score of no batch."""
        return Means()

    def input_shapes(self) -> Sequence[Any] | None:
        """Shapes of the stack's inputs for a replica's part of a microbatch.

        With them forecasts of memory, bytes and time are told; None if they are not known.
        """
        return None

    def flops(self) -> float | None:
        """Of a step: products of matrices, forward and backward; None if not known."""
        return None

    def note(self) -> Mapping[str, Any]:
        """What is noted beside checkpoints: of what the weights were made."""
        return {}

    def epilogue(self, score: Score, batches: Iterable[Any]) -> Iterator[str]:
        """Lines to say of the score at the end of training.

        Args:
            score: of the batches.
            batches: that were held out.
        """
        del score, batches
        return iter(())


def rows_of(batch: Any) -> int:
    """How many examples a batch has: the length of its first tensor with a shape."""
    if isinstance(batch, Mapping):
        batch = {name: value for name, value in batch.items() if name != SOURCE}
    for leaf in tf.nest.flatten(batch):
        shape: Any = getattr(leaf, "shape", ())
        if len(shape):
            return int(shape[0])
    return 1
