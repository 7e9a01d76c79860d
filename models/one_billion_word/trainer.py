"""Trains the language model with a TF2 loop: step, evaluation, state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from models.one_billion_word import console, heldout, metrics
from models.one_billion_word.about import About
from models.one_billion_word.corpus import Corpus
from models.one_billion_word.input import PREFETCHED_BATCHES, heldout_dataset, train_dataset
from models.one_billion_word.params import input_shapes_of, stage_flops_of
from models.one_billion_word.stage_table import stage_table
from models.one_billion_word.vocabulary import Vocabulary
from pipemesh.backend.peak import peak_flops
from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import (
    DataError,
    NotFiniteError,
    PipemeshError,
    TrainingError,
)
from pipemesh.layers import Report, mesh_cluster, report
from pipemesh.layers.named import by_logical_name
from pipemesh.recurrent import ActionClock, Placement, record_placement
from pipemesh.schedule import Timeline, simulate
from pipemesh.training import Batches, Saving, all_or_none, prepare_optimizer


class Trainer:
    """A model, its data and its checkpoints.

    Args:
        config: the model's configuration.
        corpus: the text.
        vocabulary: its vocabulary.
        device_type: `CPU` or `GPU`.
        logdir: where checkpoints and summaries go; it exists.
        about: what is noted beside checkpoints.
        eval_batches: how many held-out batches the sample has.
        restore: path of the checkpoint to go on from.
        keeps_place: whether to go on from the place in the text that it notes, too, and not from
            the text's beginning.
        keep: how many of the newest checkpoints to keep, and of the best.

    Attributes:
        task: the lingvo task.
        step: the number of finished steps.
        devices: the devices of each stage, one for each replica.
        about: what is noted beside checkpoints.
        sample: the held-out batches to judge by while training.
        saving: its checkpoints.
        restored: path of the checkpoint that it goes on from; None if there was none.
        report: what was predicted of a step, once its graph is built; None without a pipeline.
    """

    def __init__(
        self,
        config: Any,
        corpus: Corpus,
        vocabulary: Vocabulary,
        device_type: str,
        logdir: str,
        about: About,
        eval_batches: int,
        restore: str | None = None,
        keeps_place: bool = False,
        keep: tuple[int, int] = (3, 0),
    ) -> None:
        self._config, self._device_type = config, device_type
        tf.random.set_seed(config.SEED)
        with self._cluster():
            self._step = py_utils.GetOrCreateGlobalStepVar()
            self._step.assign(0)
            self._skipped = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            self.task = config.Task().Instantiate()
            self.devices = [home.devices for home in self.task.stack.StageHomes()]
        self._vocabulary = vocabulary
        self._learner = self.task.learners[0]
        prepare_optimizer(self._learner, self.task.vars.Flatten(), self._step)
        self.about = about
        state = {
            "global_step": self._step,
            "skipped_steps": self._skipped,
            **by_logical_name(self.task, self.task.vars.Flatten()),
            **by_logical_name(self.task, self._optimizer_variables()),
        }
        self.saving = Saving(logdir, state, *keep)
        self.restored = restore and self.saving.restore(restore)
        # After the model: its initializers set TensorFlow's seed, and every new seed makes
        # TensorFlow forget the state of operations, that of tokenizers included.
        sizes = {"batch_size": config.BATCH_SIZE, "sequence_length": config.SEQUENCE_LENGTH}
        # A text that is begun again has other epochs than those that are done.
        dataset = train_dataset(
            corpus, vocabulary, seed=config.SEED, first_epoch=self.step, **sizes
        )
        self.sample = heldout.draw(corpus, vocabulary, batches=eval_batches, **sizes)
        self._heldout = functools.partial(heldout_dataset, corpus, vocabulary, **sizes)
        self._batches = Batches(dataset, PREFETCHED_BATCHES)
        if self.restored and keeps_place:
            # Not that of a newer one that was damaged.
            skip = About.from_note(Manifest.read(self.restored).note).skip
            self._batches.go_to(self.restored, skip)
        self.saving.follow(self._batches)
        self.report: Report | None = None
        self.task.stack.noted_run = self._note_run
        self._train = tf.function(self._train_step, autograph=False)
        self._evaluate = tf.function(self._evaluate_batch, autograph=False)
        self._is_first, self._was_skipped = True, False
        # Graphs are placed when they run for the first time.
        self._check_placement = config.STRICT_DEVICES

    def _cluster(self, do_eval: bool = False) -> Any:
        plan = self._config.PLAN
        return mesh_cluster(plan.mesh, self._device_type, do_eval, plan.layout, plan.lowering)

    def _note_run(self, run: Any) -> None:
        stack, config = self.task.stack, self._config
        stack.noted_run = None
        shapes = input_shapes_of(config, config.PLAN.num_replicas)
        self.report = report(stack, run, shapes, self._optimizer_variables())

    @functools.cached_property
    def flops(self) -> float:
        """Of a step: products of matrices, forward and backward, without what is computed again."""
        return 3 * sum(stage_flops_of(self._config))

    @property
    def all_devices(self) -> list[str]:
        """Those of all stages."""
        return [device for home in self.devices for device in home]

    def peak_flops(self) -> float:
        """What the devices can compute a second, measured now."""
        dtype = tf.as_dtype(self._config.PLAN.compute_dtype or tf.float32)
        return peak_flops(self.all_devices, dtype)

    def stage_table(self) -> str:
        """Which layers each stage has, and where."""
        return stage_table(self._config, self.task, self.devices)

    @property
    def step(self) -> int:
        return int(self._step.numpy())

    @functools.cached_property
    def whole(self) -> tf.data.Dataset:
        """The dataset of all held-out batches.

        Raises:
            DataError: the held-out text cannot be read any more.
        """
        try:
            return self._heldout()
        except OSError as error:
            raise _vanished(error) from error

    @property
    def saved(self) -> str | None:
        """Path of the newest checkpoint."""
        return self.saving.newest

    def train_step(self) -> dict[str, Any]:
        """Trains on the next batch.

        Returns:
            `loss` (nats a token), `learning_rate`, and the batch's `score`.

        Raises:
            DataError: there is no next batch; everything can be saved.
            NotFiniteError: the loss or a gradient is not finite; nothing has changed but the place
                in the data.
            TrainingError: an operation of a stage failed.
            DeviceError: with strict devices, a stage ran elsewhere.
        """
        batch = self._next_batch()
        step = self.step + 1
        try:
            with self._cluster(), contextlib.ExitStack() as stack:
                if self._check_placement:
                    graphs = stack.enter_context(record_placement())
                if self._is_first:
                    # Python is idle while TensorFlow prepares a graph to run for the first time.
                    self._train.get_concrete_function(batch)
                    stack.enter_context(console.meanwhile(self._prepare_evaluation))
                    self._is_first = False
                loss, learning_rate, xent = self._train(batch)
        except tf.errors.OpError as error:
            explained = self.task.stack.Explain(error)
            if is_not_finite(str(explained)) or is_not_finite(error.message):
                # To locate it takes as long as the first step; of a run of them one is enough.
                located = None if self._was_skipped else self._locate(batch)
                raise NotFiniteError(
                    str(located or explained or "a gradient is not finite")
                ) from error
            if explained is None:
                raise
            self.give_up(str(explained), step, error)
        self._was_skipped = False
        # The weights that were saved last are good: the loss of this step is theirs.
        self.saving.confirm()
        if self._check_placement:
            Placement.of(graphs, self.devices).check()
            self._check_placement = False
        loss = float(loss)
        score = metrics.score(
            xent.numpy(), batch["labels"].numpy(), batch["weights"].numpy(), self._vocabulary
        )
        return {"loss": loss, "learning_rate": float(learning_rate), "score": score}

    def _prepare_evaluation(self) -> None:
        self._score(self.sample.batches[0])

    def _next_batch(self) -> Any:
        try:
            return self._batches.next()
        except DataError:
            self.saving.follow(self._batches)
            self.about = dataclasses.replace(self.about, skip=self._batches.skip)
            raise

    def _locate(self, batch: Any) -> PipemeshError | None:
        """Runs a step that failed once more, to learn where a value ceased to be finite.

        It changes nothing, because it fails again: neither weights nor random numbers have moved.
        """
        stack = self.task.stack
        stack.locates_errors = True
        try:
            with self._cluster():
                tf.function(self._train_step, autograph=False)(batch)
        except tf.errors.OpError as error:
            return self.task.stack.Explain(error)
        finally:
            stack.locates_errors = False
        return None

    def trace_schedule(self) -> tuple[Timeline, Timeline]:
        """Trains two more steps, with a clock, and says when actions ran in the second.

        Returns:
            The timeline that is predicted from the median duration of each stage's actions, and
            the measured one; both in milliseconds.
        """
        stack = self.task.stack
        stack.clock = ActionClock()
        timed = tf.function(self._train_step, autograph=False)
        plain, self._train = self._train, timed
        try:
            # The first builds the graph.
            for _ in range(2):
                self.train_step()
        finally:
            self._train = plain
        measured = stack.clock.timeline(stack.schedule, unit=1e-3)
        stack.clock = None
        return simulate(stack.schedule, measured.costs), measured

    def evaluate(
        self, batches: Iterable[Any], stopped: Callable[[], bool] = lambda: False
    ) -> metrics.Score | None:
        """Scores held-out batches; dropout is off.

        Args:
            batches: `sample.batches`, or `whole`.
            stopped: asked before each batch whether to give up.

        Returns:
            The score; None if it gave up.

        Raises:
            DataError: the held-out text cannot be read any more.
            TrainingError: an operation of a stage failed.
        """
        total = metrics.Score()
        iterator = iter(batches)
        while not stopped():
            try:
                batch = next(iterator, None)
            except tf.errors.OpError as error:
                raise _vanished(error) from error
            if batch is None:
                return total
            total += self._score(batch)
        return None

    def save(self) -> str:
        """Saves a checkpoint of everything; returns its path.

        Raises:
            SaveError: it cannot be written.
            TrainingError: with these weights the held-out loss is not finite; nothing is saved.
        """

        def check() -> None:
            # The loss of a step is that of the weights before it, so these are not yet known to be
            # good.
            loss = self._score(self.sample.batches[0]).nats
            if not np.isfinite(loss):
                self.give_up(f"the held-out loss is {loss}", self.step)

        return self.saving.save(self.step, self.about.to_note(), check)

    def begin_save(self, score: float | None = None) -> None:
        """Begins to save everything as it is now.

        It becomes a checkpoint when the next step shows that the weights are good.

        Args:
            score: what they were judged by, less is better; None if they were not.

        Raises:
            SaveError: the one before cannot be written; this one has begun.
        """
        self.saving.begin(self.step, self.about.to_note(), score)

    def skip(self) -> None:
        """Counts a step that was not made as one that was, whose weights are those before."""
        self._step.assign_add(1)
        self._skipped.assign_add(1)
        self._was_skipped = True

    @property
    def skipped(self) -> int:
        """How many steps were skipped so far, before this process, too."""
        return int(self._skipped.numpy())

    def give_up(self, what: str, step: int, error: Exception | None = None) -> NoReturn:
        """Ends training with what was good.

        Args:
            what: went wrong.
            step: in which step.
            error: that said so.

        Raises:
            TrainingError: always.
        """
        self.saving.give_up()
        kept = f"{self.saved} is kept" if self.saved else "none was written yet"
        hint = "; give a lower --learning_rate" if is_not_finite(what) else ""
        raise TrainingError(f"step {step}: {what}; of good checkpoints, {kept}{hint}") from error

    def _score(self, batch: Any) -> metrics.Score:
        try:
            with self._cluster(do_eval=True):
                xent = self._evaluate(batch)
        except tf.errors.OpError as error:
            explained = self.task.stack.Explain(error)
            if explained is None:
                raise
            self.give_up(f"evaluation: {explained}", self.step, error)
        return metrics.score(
            xent.numpy(), batch["labels"].numpy(), batch["weights"].numpy(), self._vocabulary
        )

    def _train_step(self, batch: Any) -> Any:
        batch = py_utils.NestedMap(batch)
        with py_utils.GradientTape(), py_utils.GlobalStepContext(self._step):
            scores, per_example = self.task.FPropTower(self.task.theta, batch)
            _, update, stats = self._learner.Apply(
                scores, self.task.vars, gradient_adjuster=all_or_none
            )
        # A step that fails has not been made.
        with tf.control_dependencies([update]):
            self._step.assign_add(1)
        return scores.loss[0], stats["learning_rate"][0], per_example.xent

    def _evaluate_batch(self, batch: Any) -> tf.Tensor:
        return self.task.ComputePredictions(self.task.theta, py_utils.NestedMap(batch)).xent

    def _optimizer_variables(self) -> list[tf.Variable]:
        return self._learner.optimizer._optimizer.variables()


def is_not_finite(told: str) -> bool:
    """Whether an error speaks of values that are not finite, in whosever words."""
    return re.search(r"\bnot finite\b|\b(nan|inf)\b", told, re.IGNORECASE) is not None


def _vanished(error: Exception) -> DataError:
    return DataError(f"the held-out text cannot be read any more ({reason(error)})")
