"""Evaluation of a task's weights on held-out batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from pipemesh.checkpoint import restore
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import CheckpointError, DataError, TrainingError
from pipemesh.hosts import watch
from pipemesh.training.score import Score
from pipemesh.training.subject import Subject
from pipemesh.training.trained_task import TrainedTask


class Evaluation:
    """A scorer of batches, without dropout and with moving averages in place of weights."""

    def __init__(
        self,
        subject: Subject,
        trained: TrainedTask,
        wanted: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._subject, self._trained = subject, trained
        wanted = wanted or subject.outcome
        self._evaluate = tf.function(lambda batch: trained.evaluate(batch, wanted), autograph=False)

    def outcome(self, batch: Any) -> Any:
        """Returns what `wanted` selects of a batch's results."""
        with watch.during("evaluation"):
            try:
                with self._trained.cluster(do_eval=True):
                    return self._evaluate(batch)
            except tf.errors.OpError as error:
                watch.check_workers(error)
                explained = self._trained.explain(error)
                if explained is None:
                    raise
                raise TrainingError(f"evaluation: {explained}") from error

    def score(self, batch: Any) -> Score:
        """Returns the score of a batch."""
        return scored(self._subject, batch, self.outcome(batch), self._trained.loss)

    def of(
        self, batches: Iterable[Any], stopped: Callable[[], bool] = lambda: False
    ) -> Score | None:
        """Returns the score of batches, or None if `stopped` returned True before one of them."""
        total = self._subject.nothing()
        iterator = iter(batches)
        while not stopped():
            try:
                batch = next(iterator, None)
            except tf.errors.OpError as error:
                raise vanished(error) from error
            if batch is None:
                return total
            total += self.score(batch)
        return None


def evaluate(subject: Subject, checkpoint: str) -> tuple[int, Score]:
    """Evaluates a checkpoint on all held-out batches of a subject, each once.

    The plan may differ from that of the run. Only weights and their moving averages are read.

    Args:
        subject: the model and its held-out data.
        checkpoint: path of the checkpoint.

    Returns:
        The step of the checkpoint, and the score.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or is damaged.
        DataError: there is no held-out data, or it cannot be read.
    """
    trained = restored(subject, checkpoint, subject.task_with_input(is_trained=False))
    # Read the data after the model is built: its initializers reset the state of tokenizers.
    batches = subject.heldout_data()
    if batches is None:
        raise DataError(f"{subject.name} has no held-out data; define Dev() or Test() of its class")
    score = Evaluation(subject, trained).of(batches)
    # Without `stopped` there is always a score.
    assert score is not None
    return int(trained.step.numpy()), score


def restored(subject: Subject, checkpoint: str, task: Any = None) -> TrainedTask:
    """Returns a task with the weights and moving averages of a checkpoint, not for training."""
    trained = TrainedTask(
        task or subject.task(), subject.plan, subject.device_type, subject.seed, learns=False
    )
    state = trained.state()
    if not os.path.exists(f"{checkpoint}.index"):
        raise CheckpointError(f"there is no checkpoint {checkpoint!r}")
    restore(checkpoint, state)
    return trained


def scored(subject: Subject, batch: Any, outcome: Any, loss: str) -> Score:
    """Returns the score of a batch, from tensors."""
    return subject.score(batch, tf.nest.map_structure(lambda t: t.numpy(), outcome), loss)


def vanished(error: Exception) -> DataError:
    """Returns a one-line error for held-out data that cannot be read."""
    return DataError(f"the held-out data cannot be read any more ({reason(error)})")
