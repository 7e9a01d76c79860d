"""Judges the weights of a task by batches that it is not trained on."""

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
    """Scores batches; dropout is off, and moving averages stand in for weights that have one.

    Args:
        subject: what the batches are of.
        trained: its task.
        wanted: makes what is wanted of metrics and of tensors with a row an example; by default
            what the subject scores.
    """

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
        """What is wanted of a batch.

        Raises:
            TrainingError: an operation of a stage failed.
        """
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
        """The score of a batch.

        Raises:
            TrainingError: an operation of a stage failed.
        """
        return scored(self._subject, batch, self.outcome(batch), self._trained.loss)

    def of(
        self, batches: Iterable[Any], stopped: Callable[[], bool] = lambda: False
    ) -> Score | None:
        """The score of batches.

        Args:
            batches: any number.
            stopped: asked before each batch whether to give up.

        Returns:
            The score; None if it gave up.

        Raises:
            DataError: they cannot be read any more.
            TrainingError: an operation of a stage failed.
        """
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
    """Judges a checkpoint by all held-out batches of a subject, each once.

    Under any plan; of the checkpoint only weights are read, and their moving averages.

    Args:
        subject: the model, and what to judge by.
        checkpoint: its path.

    Returns:
        The step of the checkpoint, and the score.

    Raises:
        CheckpointError: it is another model's, or damaged.
        DataError: there is nothing to judge by, or it cannot be read.
    """
    trained = restored(subject, checkpoint, subject.task_with_input(is_trained=False))
    # After the model, whose initializers make TensorFlow forget the state of tokenizers.
    batches = subject.heldout_data()
    if batches is None:
        raise DataError(f"{subject.name} has no held-out data; define Dev() or Test() of its class")
    score = Evaluation(subject, trained).of(batches)
    # Nothing stops it.
    assert score is not None
    return int(trained.step.numpy()), score


def restored(subject: Subject, checkpoint: str, task: Any = None) -> TrainedTask:
    """A task with the weights of a checkpoint, and their moving averages, to be used.

    Args:
        subject: the model, under any plan.
        checkpoint: its path.
        task: params of its task; by default without an input.

    Raises:
        CheckpointError: there is none, it is another model's, or damaged.
    """
    trained = TrainedTask(
        task or subject.task(), subject.plan, subject.device_type, subject.seed, learns=False
    )
    state = trained.state()
    if not os.path.exists(f"{checkpoint}.index"):
        raise CheckpointError(f"there is no checkpoint {checkpoint!r}")
    restore(checkpoint, state)
    return trained


def scored(subject: Subject, batch: Any, outcome: Any, loss: str) -> Score:
    """The score of a batch, from tensors."""
    return subject.score(batch, tf.nest.map_structure(lambda t: t.numpy(), outcome), loss)


def vanished(error: Exception) -> DataError:
    """An error of reading held-out data in a line."""
    return DataError(f"the held-out data cannot be read any more ({reason(error)})")
