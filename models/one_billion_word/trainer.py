"""Trains the language model with a TF2 loop: step, evaluation, state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
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
from pipemesh.checkpoint import Checkpoints, Manifest, newest_whole
from pipemesh.checkpoint.folder import go_back
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import CheckpointError, DamagedError, DataError, PipemeshError, SaveError
from pipemesh.layers import Report, mesh_cluster, report
from pipemesh.layers.named import by_logical_name
from pipemesh.recurrent import ActionClock, Placement, record_placement
from pipemesh.schedule import Timeline, simulate
from pipemesh.training import Batches, prepare_optimizer
from pipemesh.training.batches import NAME


class TrainingError(PipemeshError, RuntimeError):
    """Training cannot go on."""


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
        skip: how many batches after the place in the text that this checkpoint holds to go on;
            None to go on from the text's beginning.
        keep: how many of the newest checkpoints to keep, and of the best.

    Attributes:
        task: the lingvo task.
        step: the number of finished steps.
        devices: the devices of each stage, one for each replica.
        about: what is noted beside checkpoints.
        sample: the held-out batches to judge by while training.
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
        skip: int | None = None,
        keep: tuple[int, int] = (3, 0),
    ) -> None:
        self._config, self._device_type = config, device_type
        tf.random.set_seed(config.SEED)
        with self._cluster():
            self._step = py_utils.GetOrCreateGlobalStepVar()
            self._step.assign(0)
            self.task = config.Task().Instantiate()
            self.devices = [home.devices for home in self.task.stack.StageHomes()]
        self._vocabulary = vocabulary
        self._learner = self.task.learners[0]
        prepare_optimizer(self._learner, self.task.vars.Flatten(), self._step)
        self.about = about
        state = {
            "global_step": self._step,
            **by_logical_name(self.task, self.task.vars.Flatten()),
            **by_logical_name(self.task, self._optimizer_variables()),
        }
        self._logdir = logdir
        self._checkpoints = Checkpoints(logdir, state, *keep)
        self.restored = restore and self._restore(restore, *state)
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
        if self.restored and skip is not None:
            self._batches.go_to(self.restored, skip)
        self._checkpoints.track(**{NAME: self._batches.iterator})
        self.report: Report | None = None
        self.task.stack.noted_run = self._note_run
        self._train = tf.function(self._train_step, autograph=False)
        self._evaluate = tf.function(self._evaluate_batch, autograph=False)
        self._is_first = True
        # Graphs are placed when they run for the first time.
        self._check_placement = config.STRICT_DEVICES

    def _cluster(self, do_eval: bool = False) -> Any:
        plan = self._config.PLAN
        return mesh_cluster(plan.mesh, self._device_type, do_eval, plan.layout, plan.lowering)

    def _restore(self, path: str, *names: str) -> str:
        """Restores what is tracked; returns the path of the checkpoint it came from."""
        try:
            beyond = [n for n in self._checkpoints.restore(path, *names) if n != NAME]
        except DamagedError as error:
            damaged = Manifest.read(path).note
            go_back(error)
            found = newest_whole(self._logdir)
            if found is None:
                raise
            if {**found[1].note, "skip": 0} != {**damaged, "skip": 0}:
                # What was made by its note is not what the one before was made with.
                raise CheckpointError(
                    f"{error}; {found[0]} was made with other settings, so run the same command "
                    "again to go on from it"
                ) from error
            return self._restore(found[0], *names)
        if beyond:
            raise CheckpointError(
                f"{path} has {len(beyond)} tensors that the model has not, such as {beyond[0]!r}; "
                "give another --logdir, or the settings it was trained with"
            )
        return path

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
        return self._checkpoints.newest

    def train_step(self) -> dict[str, Any]:
        """Trains on the next batch.

        Returns:
            `loss` (nats a token), `learning_rate`, and the batch's `score`.

        Raises:
            DataError: there is no next batch; everything can be saved.
            TrainingError: the loss or a gradient is not finite, or an operation of a stage failed.
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
            # lingvo asserts this of the norm of all gradients, too.
            if "not finite" in error.message:
                explained = self._locate(batch) or explained or "a gradient is not finite"
            if explained is None:
                raise
            self._fail(str(explained), step, error)
        # The weights that were saved last are good: the loss of this step is theirs.
        self._checkpoints.confirm()
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
            self._checkpoints.track(**{NAME: self._batches.iterator})
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
            return stack.Explain(error)
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
        name = f"ckpt-{self.step}"
        if not self.saved or os.path.basename(self.saved) != name:
            # The loss of a step is that of the weights before it, so these are not yet known to be
            # good.
            loss = self._score(self.sample.batches[0]).nats
            if not np.isfinite(loss):
                self._fail(f"the held-out loss is {loss}", self.step)
            self._checkpoints.confirm()
        path = self._checkpoints.wait()
        if not path or os.path.basename(path) != name:
            self._begin_save()
            self._checkpoints.confirm()
            path = self._checkpoints.wait()
        assert path is not None
        return path

    def begin_save(self, score: float | None = None) -> None:
        """Begins to save everything as it is now.

        It becomes a checkpoint when the next step shows that the weights are good.

        Args:
            score: what they were judged by, less is better; None if they were not.

        Raises:
            SaveError: the one before cannot be written; this one has begun.
        """
        try:
            self._checkpoints.wait()
        finally:
            self._begin_save(score)

    def poll_save(self) -> None:
        """Tells whether what was begun is written.

        Raises:
            SaveError: it cannot be.
        """
        self._checkpoints.poll()

    def _begin_save(self, score: float | None = None) -> None:
        path = self._checkpoints.begin(self.step, self.about.to_note(), score)
        self._batches.saved(path)

    def _fail(self, what: str, step: int, error: Exception | None = None) -> NoReturn:
        self._checkpoints.abandon()
        with contextlib.suppress(SaveError):
            self._checkpoints.wait()
        kept = f"{self.saved} is kept" if self.saved else "none was written yet"
        told = what.lower()
        diverged = any(word in told for word in ("finite", "nan", "had inf", "had -inf"))
        hint = "; give a lower --learning_rate" if diverged else ""
        raise TrainingError(f"step {step}: {what}; of good checkpoints, {kept}{hint}") from error

    def _score(self, batch: Any) -> metrics.Score:
        try:
            with self._cluster(do_eval=True):
                xent = self._evaluate(batch)
        except tf.errors.OpError as error:
            explained = self.task.stack.Explain(error)
            if explained is None:
                raise
            self._fail(f"evaluation: {explained}", self.step, error)
        return metrics.score(
            xent.numpy(), batch["labels"].numpy(), batch["weights"].numpy(), self._vocabulary
        )

    def _train_step(self, batch: Any) -> Any:
        batch = py_utils.NestedMap(batch)
        with py_utils.GradientTape(), py_utils.GlobalStepContext(self._step):
            scores, per_example = self.task.FPropTower(self.task.theta, batch)
            _, update, stats = self._learner.Apply(scores, self.task.vars)
        # A step that fails has not been made.
        with tf.control_dependencies([update]):
            self._step.assign_add(1)
        return scores.loss[0], stats["learning_rate"][0], per_example.xent

    def _evaluate_batch(self, batch: Any) -> tf.Tensor:
        return self.task.ComputePredictions(self.task.theta, py_utils.NestedMap(batch)).xent

    def _optimizer_variables(self) -> list[tf.Variable]:
        return self._learner.optimizer._optimizer.variables()


def _vanished(error: Exception) -> DataError:
    return DataError(f"the held-out text cannot be read any more ({reason(error)})")
