"""Evaluation of a task on held-out batches, and its predictions for single examples."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip


import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from lingvo.core import base_model

from pipemesh.checkpoint.reader import reason
from pipemesh.errors import CheckpointError, DataError, TrainingError
from pipemesh.hosts import watch
from pipemesh.training.saving import restore_all
from pipemesh.training.subject import Score, Subject, rows_of
from pipemesh.training.trained_task import TrainedTask


class Evaluation:
    """A scorer of batches, without dropout and with moving averages in place of weights."""

    def __init__(
        self,
        subject: Subject,
        trained: TrainedTask,
        select: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._subject, self._trained = subject, trained
        select = select or subject.outcome
        self._evaluate = tf.function(lambda batch: trained.evaluate(batch, select), autograph=False)

    def outcome(self, batch: Any) -> Any:
        """Returns what `select` selects of a batch's results."""
        return _computed(self._trained, "evaluation", self._evaluate, batch)

    def score(self, batch: Any) -> Score:
        """Returns the score of a batch."""
        return scored(self._subject, batch, self.outcome(batch), self._trained.loss)

    def of(
        self, batches: Iterable[Any], stopped: Callable[[], bool] = lambda: False
    ) -> Score | None:
        """Returns the score of batches, or None if `stopped` returned True before one of them."""
        total = self._subject.nothing()
        iterator = _each(batches)
        while not stopped():
            batch = next(iterator, None)
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
    batches = _heldout(subject)
    score = Evaluation(subject, trained).of(batches)
    # Without `stopped` there is always a score.
    assert score is not None
    return int(trained.step.numpy()), score


def restored(subject: Subject, checkpoint: str, task: Any = None) -> TrainedTask:
    """Returns a task with the weights and moving averages of a checkpoint, not for training."""
    trained = TrainedTask(
        task or subject.task(), subject.plan, subject.device_type, subject.seed, learns=False
    )
    if not os.path.exists(f"{checkpoint}.index"):
        raise CheckpointError(f"there is no checkpoint {checkpoint!r}")
    restore_all(checkpoint, trained.state())
    return trained


def _computed(trained: TrainedTask, doing: str, compute: Callable[[Any], Any], batch: Any) -> Any:
    """Runs a graph that does not train; `doing` names it in errors."""
    with watch.during(doing):
        try:
            with trained.cluster(do_eval=True):
                return compute(batch)
        except tf.errors.OpError as error:
            watch.check_workers(error)
            explained = trained.explain(error)
            if explained is None:
                raise
            raise TrainingError(f"{doing}: {explained}") from error


def _heldout(subject: Subject) -> Iterable[Any]:
    """Returns the held-out batches; call it after the model is built, whose initializers reset the
    state of tokenizers.
    """
    batches = subject.heldout_data()
    if batches is None:
        raise DataError(f"{subject.name} has no held-out data; define Dev() or Test() of its class")
    return batches


def _each(batches: Iterable[Any]) -> Iterator[Any]:
    """Yields held-out batches; an error says in one line that they cannot be read."""
    try:
        yield from batches
    except tf.errors.OpError as error:
        raise vanished(error) from error


def scored(subject: Subject, batch: Any, outcome: Any, loss: str) -> Score:
    """Returns the score of a batch, from tensors."""
    return subject.score(batch, tf.nest.map_structure(lambda t: t.numpy(), outcome), loss)


def vanished(error: Exception) -> DataError:
    """Returns a one-line error for held-out data that cannot be read."""
    return DataError(f"the held-out data cannot be read any more ({reason(error)})")


# The name of a prediction that is a single tensor.
_ONE = "predictions"


class Predictor:
    """A predictor without dropout, with moving averages in place of weights, under any plan."""

    def __init__(self, subject: Subject, checkpoint: str) -> None:
        kind = subject.task().cls
        if kind.ComputePredictions is base_model.BaseTask.ComputePredictions:
            raise TrainingError(
                f"{subject.name}: its task {kind.__name__} has no ComputePredictions of its own, "
                "so nothing says what it predicts; define it (FPropTower calls it, unless that is "
                "overridden)"
            )
        self._trained = restored(subject, checkpoint, subject.task_with_input(is_trained=False))
        self._batches = _heldout(subject)
        self.left_out: set[str] = set()
        self._predict = tf.function(self._trained.predict, autograph=False)

    def examples(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the predictions for each held-out example in order, without padding."""
        for batch in _each(self._batches):
            yield from self._of(batch)

    def _of(self, batch: Any) -> Iterator[dict[str, np.ndarray]]:
        rows = rows_of(batch)
        predictions = _computed(self._trained, "prediction", self._predict, batch)
        # Values in a map need no prefix.
        named = {name.removeprefix(f"{_ONE}."): value for name, value in _arrays(_ONE, predictions)}
        kept = {name: value for name, value in named.items() if value.shape[:1] == (rows,)}
        self.left_out |= named.keys() - kept.keys()
        if not kept:
            raise TrainingError(
                f"of what ComputePredictions returns ({', '.join(named) or 'nothing'}) nothing has "
                f"a row for each of {rows} examples"
            )
        weights = np.asarray(batch["weights"]) if "weights" in batch else np.ones([rows])
        for row in range(rows):
            if weights.shape != (rows,) or weights[row]:
                yield {name: value[row] for name, value in kept.items()}


def _arrays(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor of a nested value under its own name, `outputs.a` or `outputs[0]`."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _arrays(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _arrays(f"{name}[{number}]", item)
    else:
        yield name, np.asarray(value)
