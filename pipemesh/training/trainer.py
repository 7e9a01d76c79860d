"""The trainer: steps, evaluation and state of a subject, in TF2."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from pipemesh.backend.cluster import host_of, task_of
from pipemesh.backend.dataset_functions import calls_this_process
from pipemesh.backend.devices import short_name
from pipemesh.backend.graphs import record_placement
from pipemesh.backend.peak import peak_flops
from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.manifest import BASE, WEIGHTS_ONLY
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import DataError, NotFiniteError, PipemeshError, RescaledError, TrainingError
from pipemesh.hosts import watch
from pipemesh.layers import Report, report
from pipemesh.layers.partition_layers import layer_flops
from pipemesh.layers.pipeline.alike_stages import simd_split
from pipemesh.recurrent import ActionClock, Marks, Placement
from pipemesh.schedule import Timeline, simulate
from pipemesh.text import columns
from pipemesh.training.evaluation import Evaluation, scored, vanished
from pipemesh.training.inputs import Batches
from pipemesh.training.lingvo_params import has_state, ramped, rates_of
from pipemesh.training.run import EVAL_BATCHES, Options, console
from pipemesh.training.saving import Saving
from pipemesh.training.subject import Sample, Score, Subject
from pipemesh.training.trained_task import LOSS_NOT_FINITE, NOT_FINITE, TrainedTask, is_not_finite


def stage_rows(stack: Any, shapes: Sequence[Any] | None = None) -> list[tuple[str, ...]]:
    """Returns the column names, and a row for each stage: layers, share of flops if `shapes`
    (inputs of a microbatch) are known, parameters, devices.
    """
    p = stack.params
    homes = [home.devices for home in stack.StageHomes()]
    stages = [(str(i), cell, homes[i]) for i, cell in enumerate(p.cell_tpl)]
    if p.lowering == "simd" and p.loss_inside and p.pipelined:
        before, cells, behind = simd_split(p, p.cell_tpl)
        everywhere = list(dict.fromkeys(device for home in homes for device in home))
        stages = [
            ("all", before, everywhere),
            *((n, c, d) for (n, _, d), c in zip(stages, cells, strict=True)),
            ("all", behind, everywhere),
        ]
    flops = None
    if shapes is not None:
        flops = layer_flops([layer for cell in p.cell_tpl for layer in layers_of(cell)], *shapes)
    last = "device" if len(homes[0]) == 1 else "devices"
    shares = () if flops is None else ("flops",)
    rows: list[tuple[str, ...]] = [("stage", "layers", *shares, "parameters", last)]
    remaining = iter(flops or ())
    for number, cell, devices in stages:
        if cell is None:
            continue
        layers = layers_of(cell)
        if flops is not None:
            shares = (f"{sum(itertools.islice(remaining, len(layers))) / sum(flops):.1%}",)
        runs = [(n, len(list(run))) for n, run in itertools.groupby(x.cls.__name__ for x in layers)]
        variables = stack.children[cell.name].vars.Flatten()
        rows.append(
            (
                number,
                " + ".join(name if count == 1 else f"{count} {name}" for name, count in runs),
                *shares,
                f"{sum(v.shape.num_elements() for v in variables):,}",
                " ".join(map(short_name, devices)),
            )
        )
    return rows


def layers_of(cell: Any) -> list[Any]:
    """Returns the params of the layers in a stage's params."""
    return list(cell.sub) if "sub" in cell else [cell]


# A healthy worker answers within milliseconds.
_ANSWER = 1.0
# Flops predict a stage's time within some tens of percent; above this ratio the worker is slow.
_SLOW = 2.0


class Work(NamedTuple):
    """The recent work of a worker, as the record has it."""

    # Number, address and stages.
    worker: str
    # Busy seconds of one of its devices, per step.
    seconds: float
    # Time for the same flops as a multiple of the other workers'; None if flops are unknown, or
    # there is no other.
    times: float | None
    # Whether it takes so much longer that the model cannot be the reason.
    is_slow: bool


class Workers:
    """The current actions of workers, from marks in pipelines; the watch receives them."""

    def __init__(self, pipelines: Sequence[Any], watched: watch.Watch) -> None:
        self._watched = watched
        self._marks: list[Marks] = []
        for stack in pipelines:
            if not (stack.params.pipelined and stack.simd is None):
                continue
            homes = [home.devices for home in stack.StageHomes()]
            stack.clock = Marks(stack.schedule, homes, task_of)
            self._marks.append(stack.clock)
        # The last values read, and the number of steps then.
        self._before: dict[str, float] = {}
        self._steps = self._then = 0
        watched.progress = self

    def look(self) -> None:
        """Asks workers for their progress without waiting."""
        for marks in self._marks:
            marks.look()

    def waits(self) -> dict[int, list[str]]:
        """Returns the unfinished actions of each worker's devices, by its task."""
        by_task: dict[int, list[str]] = {}
        for marks in self._marks:
            for wait in marks.waits(_ANSWER):
                task = task_of(wait.stand.name)
                if task is not None:
                    by_task.setdefault(task, []).append(wait.told(self._name))
        return by_task

    def end_step(self) -> None:
        """Notes that a step was finished."""
        self._steps += 1
        for marks in self._marks:
            marks.end_step()
        if self._steps == 1:
            # The first step does more work than others.
            self.work(None)

    def end_failed_step(self) -> None:
        """Notes that a step was abandoned."""
        for marks in self._marks:
            marks.end_failed_step(_ANSWER)

    def work(self, costs: Mapping[str, Sequence[float]] | None) -> list[Work]:
        """Returns the work of each worker with a stage since the last call, between two steps;
        `costs` has flops by kind of action and stage.
        """
        steps = self._steps - self._then
        if not (self._marks and steps):
            return []
        now: dict[str, float] = {}
        for marks in self._marks:
            now.update(marks.seconds_at_work(_ANSWER))
        taken = {device: now[device] - self._before.get(device, 0.0) for device in now}
        self._before, self._then = now, self._steps
        by_task: dict[int, list[str]] = {}
        for device in taken:
            if (task := task_of(device)) is not None:
                by_task.setdefault(task, []).append(device)
        # Flops of single devices are known of one pipeline.
        expected = self._marks[0].shares(costs) if costs and len(self._marks) == 1 else {}
        rates = {
            task: sum(taken[d] for d in devices) / flops
            for task, devices in by_task.items()
            if (flops := sum(expected.get(d, 0.0) for d in devices)) > 0
        }
        work: list[Work] = []
        for task, devices in sorted(by_task.items()):
            others = [rate for other, rate in rates.items() if other != task]
            usual = statistics.median(others) if others else 0.0
            times = rates[task] / usual if task in rates and usual > 0 else None
            seconds = sum(taken[device] for device in devices) / len(devices) / steps
            is_slow = times is not None and times >= _SLOW
            work.append(Work(self._watched.name(task), seconds, times, is_slow))
        return work

    def _name(self, device: str) -> str:
        task = task_of(device)
        return device if task is None else f"{self._watched.name(task)} {device[-5:]}"


class SeveralSteps:
    """A loop of training steps in one graph.

    A call of a graph by Python takes a millisecond or so; a loop takes it once for all its steps.
    What a step returns goes through a queue, which keeps that of finished steps if a later one
    fails.

    Args:
        step: the `tf.function` of a step; it takes a batch, and returns loss, learning rate, norm,
            outcome and gradients. Gradients are not kept.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self._loop = tf.function(self._steps, autograph=False)
        # The nested outputs of a step, with True for each tensor, and the queue of their tensors.
        self._outputs: Any = None
        self._queue: Any = None

    def graph(self, batches: Sequence[Any]) -> Any:
        """Returns the graph for batches of these shapes, whatever their number.

        Raises:
            TrainingError: the batches differ in shape.
        """
        specs = [tf.nest.map_structure(_spec, batch) for batch in batches]
        for spec in specs[1:]:
            if spec != specs[0]:
                shapes = [[s.shape.as_list() for s in tf.nest.flatten(x)] for x in (specs[0], spec)]
                raise TrainingError(
                    f"batches have the shapes {shapes[0]} and {shapes[1]}, but the steps of a call "
                    "take equal ones; use --steps_per_call=1"
                )
        of_all = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), specs[0])
        return self._loop.get_concrete_function(of_all, tf.TensorSpec([], tf.int32))

    def __call__(self, batches: Sequence[Any]) -> list[Any]:
        """Runs a step for each batch; returns their outputs without gradients."""
        graph = self.graph(batches)
        with tf.device("CPU:0"):
            stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        graph(stacked, tf.constant(len(batches)))
        return self.results()

    def results(self) -> list[Any]:
        """Returns the outputs of the steps finished since the last call, and forgets them."""
        if self._queue is None:
            return []
        with tf.device("CPU:0"):
            return [self._dequeue() for _ in range(int(self._queue.size()))]

    def _dequeue(self) -> Any:
        values = iter(tf.nest.flatten(self._queue.dequeue()))
        flat = [v if v is None else next(values) for v in tf.nest.flatten(self._outputs)]
        return tf.nest.pack_sequence_as(self._outputs, flat)

    def _steps(self, batches: Any, number: tf.Tensor) -> Any:
        def body(index: tf.Tensor) -> Any:
            with tf.device("CPU:0"):
                batch = tf.nest.map_structure(lambda t: t[index], batches)
            *outputs, _ = self._step(batch)
            values = [value for value in tf.nest.flatten(outputs) if value is not None]
            if self._queue is None:
                self._outputs = tf.nest.map_structure(lambda v: v if v is None else True, outputs)
                with tf.init_scope(), tf.device("CPU:0"):
                    self._queue = tf.queue.FIFOQueue(2**31 - 1, [value.dtype for value in values])
            # The loss is known before the weights are updated; the call ends after that.
            with tf.control_dependencies([values[0].op]), tf.device("CPU:0"):
                self._queue.enqueue(values)
            return index + 1

        return tf.while_loop(lambda index: index < number, body, [0], parallel_iterations=1)


def _shapes(batch: Any) -> str:
    return str(tf.nest.map_structure(_spec, batch))


def _spec(value: Any) -> tf.TensorSpec:
    return tf.TensorSpec(value.shape, value.dtype)


# Number of steps with timed actions.
_TIMED = 5


class Trainer:
    """A subject, its batches and its checkpoints.

    Args:
        subject: the subject.
        options: the settings of the run; its `logdir` exists.
        restore: path of the checkpoint to resume from.
        keeps_place: whether to resume at the checkpoint's position in the data, instead of at the
            beginning.

    Attributes:
        subject: the subject.
        trained: the task and its variables.
        batches: the batches to train on, and the position in them.
        sample: the held-out batches for evaluation during the run.
        saving: its checkpoints.
        restored: path of the checkpoint that it resumed from; None if there was none.
        report: the forecast of a step, once its graph is built; None without a pipeline.
        workers: the workers that run its stages; None if this process does.
        best: the best score during the run, and the number of evaluations since without
            improvement.
        batch: the last step's batch; None before the first step.
        judged: the step of the last evaluation during the run; 0 if there was none.
        keeps_place: whether it resumed at a position in the data.
        gradients: the last step's gradients by name, one for each variable of a weight; {} unless
            histograms are requested.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or is damaged.
        PipemeshError: the task cannot be made on the plan's mesh, or the data cannot be read.
    """

    def __init__(
        self,
        subject: Subject,
        options: Options,
        restore: str | None = None,
        keeps_place: bool = False,
    ) -> None:
        self.subject = subject
        params = subject.task_with_input(is_trained=True)
        if options.find_learning_rate:
            if restore and has_state(params):
                raise TrainingError(
                    f"{subject.name}: the schedule of its learning rate has variables, which the "
                    "range test replaces; begin it with new weights, in another log directory"
                )
            params = ramped(params, options.find_learning_rate)
        self.trained = TrainedTask(params, subject.plan, subject.device_type, subject.seed)
        keep = options.max_to_keep, options.keep_best
        base = () if subject.saves_frozen else self.trained.frozen()
        self.saving = Saving(
            options.logdir, self.trained.state(), *keep, self.trained.weights(), base
        )
        if base and not restore:
            raise TrainingError(
                f"{subject.name}: adapters are trained on the weights of a checkpoint, but "
                f"{options.logdir!r} has none; begin with `pipemesh checkpoint import`"
            )
        self.restored = restore and self.saving.restore(restore)
        if options.find_learning_rate:
            self.trained.learners[0].lr_schedule.first_step = self.step
        # Read the data after the model is built. Its initializers set TensorFlow's seed, and a new
        # seed resets the state of operations, including tokenizers. Data that restarts continues
        # with new epochs.
        self.trained.reader = self._reader(options.read_data)
        with self._where_data_is_read():
            dataset = subject.train_data(self.step)
            if self.trained.reader and calls_this_process(dataset):
                raise DataError(
                    f"{subject.name}: its data calls functions of Python in this process, as "
                    "tf.numpy_function and from_generator do, so batches would pass it; leave "
                    "--read_data=workers out"
                )
            self.batches = Batches(dataset, subject.read_ahead, watch.check_workers)
        self.trained.filters = subject.filters
        self.sample = Sample((), "none, learning rates are tried")
        if not options.find_learning_rate:
            self.sample = self._sample(options.eval_batches or EVAL_BATCHES)
        self.best: tuple[float | None, int] = (None, 0)
        self.judged, self.keeps_place = 0, False
        if self.restored:
            # A newer, damaged checkpoint may have another note.
            note = Manifest.read(self.restored).note
            best, since = note.get("best", (None, 0))
            self.best, self.judged = (best, since), note.get("judged", self.step)
            # Imported weights, and those that get adapters, come without optimizer state.
            only = bool(note.get(WEIGHTS_ONLY))
            if only or (base and BASE not in note):
                self.trained.begin_averages()
            self.keeps_place = keeps_place and self.batches.is_restorable and not only
            if self.keeps_place:
                self.batches.go_to(self.restored, note.get("skip", 0))
        self._skip = 0
        self.saving.follow(self.batches)
        self.report: Report | None = None
        watched = watch.current()
        if watched and options.steps_per_call > 1:
            raise TrainingError(
                f"--steps_per_call={options.steps_per_call}: steps on workers are watched each; "
                "use 1, or leave --cluster out"
            )
        self._specs = subject.batch_specs()
        if self._specs and options.trace_schedule:
            raise TrainingError(
                "--trace_schedule times steps of one length, but batches in buckets differ; leave "
                "one of them out"
            )
        if self._specs and options.steps_per_call > 1:
            raise TrainingError(
                f"--steps_per_call={options.steps_per_call}: batches in buckets differ in length, "
                "but the steps of a call take equal ones; use --steps_per_call=1"
            )
        with self.trained.cluster():
            # Before graphs are built, which note the actions.
            self.workers = watched and Workers(self.trained.pipelines, watched)
        for stack in self.trained.pipelines:
            stack.noted_run = lambda run, stack=stack: self._note_run(stack, run)
        self._tells_gradients = options.histogram_every > 0
        self.gradients: dict[str, list[tf.Tensor]] = {}
        self._train = tf.function(self._train_step, autograph=False)
        self._several = SeveralSteps(self._train)
        # Batches that were read for a call, and the error of a step or of the data where it is due.
        self._read: collections.deque[Any] = collections.deque()
        self._evaluation = Evaluation(subject, self.trained)
        self._is_first, self._was_skipped = True, False
        self.batch: Any = None
        # Graphs are checked when TensorFlow places them, at their first call: those of one step
        # (True) and of several, for each shape of batches.
        self._is_strict = any(s.params.strict_devices for s in self.trained.pipelines)
        self._checked = set[tuple[bool, str]]()

    def _reader(self, who: str) -> str:
        """Returns the CPU of the worker that reads the data; "" if this process does."""
        if who == "client":
            return ""
        host = host_of(self.trained.all_devices()[0])
        if task_of(host) is None:
            raise TrainingError(
                f"--read_data={who}: the first stage is computed by this process, not by a worker; "
                "give their addresses by --cluster, or leave it out"
            )
        return host

    @contextlib.contextmanager
    def _where_data_is_read(self) -> Iterator[None]:
        """Places datasets made inside; errors of a worker that makes them get one line."""
        if not self.trained.reader:
            yield
            return
        try:
            with tf.device(self.trained.reader):
                yield
        except tf.errors.OpError as error:
            watch.check_workers(error)
            raise DataError(f"the data cannot be read ({reason(error)})") from error

    def _sample(self, batches: int) -> Sample:
        """Returns the held-out batches for evaluation during the run, which are sent once."""
        try:
            sample = self.subject.sample(batches)
        except tf.errors.OpError as error:
            raise vanished(error) from error
        if not self.trained.reader:
            return sample
        with self._where_data_is_read():
            there = [tf.nest.map_structure(tf.identity, batch) for batch in sample.batches]
        return dataclasses.replace(sample, batches=there)

    def _note_run(self, stack: Any, run: Any) -> None:
        stack.noted_run = None
        shapes = self.subject.input_shapes()
        if shapes is not None:
            self.report = report(stack, run, shapes, self.trained.optimizer_variables())

    def stage_table(self) -> str:
        """Returns a table of each stage's layers and devices; "" without a pipeline."""
        tables: list[str] = []
        for rows in self.stage_rows():
            head, *lines = columns(rows, left=(0, 1, len(rows[0]) - 1))
            tables.append("\n".join([head, "-" * len(head), *lines]))
        return "\n\n".join(tables)

    def stage_rows(self) -> list[list[tuple[str, ...]]]:
        """Returns the rows of the table, for each pipeline."""
        with self.trained.cluster():
            shapes = self.subject.input_shapes()
            return [stage_rows(stack, shapes) for stack in self.trained.pipelines]

    def peak_flops(self) -> float:
        """Measures and returns the flops per second that the devices reach."""
        dtype = tf.as_dtype(self.subject.plan.compute_dtype or tf.float32)
        return peak_flops(self.trained.all_devices(), dtype)

    def work(self) -> list[Work]:
        """Returns the work of workers since the last call; nothing if this process drives none."""
        if self.workers is None:
            return []
        timeline = self.report.timeline if self.report else None
        costs = timeline and timeline.costs.per_stage(timeline.schedule.num_stages).durations()
        return self.workers.work(costs)

    @property
    def step(self) -> int:
        """Returns the number of finished steps."""
        return int(self.trained.step.numpy())

    @property
    def skipped(self) -> int:
        """Returns the number of skipped steps, including those of earlier processes."""
        return int(self.trained.skipped.numpy())

    @property
    def whole(self) -> Iterable[Any]:
        """Returns all held-out batches.

        Raises:
            DataError: the held-out data cannot be read any more.
        """
        try:
            return self.subject.heldout_data() or ()
        except OSError as error:
            raise vanished(error) from error

    @property
    def kept(self) -> str:
        """Describes the last complete checkpoint."""
        saved = self.saving.newest
        return f"{saved} is kept" if saved else "none was written yet"

    def train_step(self) -> dict[str, Any]:
        """Trains on the next batch.

        Returns:
            `loss`, `learning_rate`, the batch's `score`, and `gradient_norm`, before clipping; None
            if each gradient is clipped by its own norm.

        Raises:
            DataError: there is no next batch; everything can be saved.
            NotFiniteError: the loss or a gradient is not finite; only the position in the data
                changed.
            RescaledError: gradients overflowed float16; the loss scale has changed too.
            TrainingError: an operation of a stage failed.
            DeviceError: with strict devices, a stage ran on another device.
        """
        (result,) = self.train_steps(1)
        return result

    def train_steps(self, most: int) -> list[dict[str, Any]]:
        """Trains on at most `most` next batches in one call of the graph.

        Returns:
            What `train_step` returns, for each finished step; fewer than `most` if one failed. The
            next call then raises its error, and the one after that goes on with the next batch.

        Raises:
            TrainingError: the batches differ in shape; otherwise as `train_step`.
        """
        read = self._read
        while len(read) < most and not (read and isinstance(read[-1], PipemeshError)):
            try:
                read.append(self._next_batch())
            except DataError as error:
                read.append(error)
        if isinstance(read[0], PipemeshError):
            raise read.popleft()
        known = itertools.takewhile(lambda batch: not isinstance(batch, PipemeshError), read)
        batches = list(itertools.islice(known, most))
        try:
            finished, failure = self._run(batches), None
        except PipemeshError as error:
            finished, failure = self._several.results(), error
        ended = len(finished) + (failure is not None)
        self.batch = batches[ended - 1]
        for _ in range(ended):
            read.popleft()
        if failure is not None:
            if not finished:
                raise failure
            read.appendleft(failure)
        return [
            {
                "loss": float(loss),
                "learning_rate": float(learning_rate),
                "gradient_norm": None if norm is None else float(norm),
                "score": scored(self.subject, batch, outcome, self.trained.loss),
            }
            for batch, (loss, learning_rate, norm, outcome) in zip(batches, finished, strict=False)
        ]

    def _run(self, batches: Sequence[Any]) -> list[Any]:
        """Runs a step for each batch in one call; returns their losses, learning rates, norms and
        outcomes.
        """
        first, graphs = self.step + 1, None
        one = len(batches) == 1
        name = f"step {first}" if one else f"steps {first} to {first + len(batches) - 1}"
        watch.begin(name, is_step=True)
        try:
            with self.trained.cluster(), contextlib.ExitStack() as stack:
                if self._is_strict and (shape := (one, _shapes(batches[0]))) not in self._checked:
                    self._checked.add(shape)
                    graphs = stack.enter_context(record_placement())
                if self._is_first:
                    # Python is idle while TensorFlow prepares a graph for its first run.
                    if one:
                        self._build_graphs()
                        self._train.get_concrete_function(batches[0])
                    else:
                        self._several.graph(batches)
                    stack.enter_context(console.meanwhile(self._prepare_evaluation))
                    self._is_first = False
                if one:
                    *outputs, self.gradients = self._train(batches[0])
                    finished = [outputs]
                else:
                    finished = self._several(batches)
        except tf.errors.OpError as error:
            number = self.step + 1 - first
            if number:
                self._was_skipped = False
                self.saving.confirm()
            self._fail(error, first + number, batches[number], graphs)
        self._was_skipped = False
        watch.end_step()
        if self.workers:
            self.workers.end_step()
        # This step's loss was computed with the last saved weights, so they are good.
        self.saving.confirm()
        self._check_devices(graphs)
        return finished

    def _build_graphs(self) -> None:
        """Builds the graph of a step for each shape of batches, if there are several."""
        # The report is on the longest rows.
        for specs in reversed(self._specs):
            try:
                self._train.get_concrete_function(specs)
            except PipemeshError as error:
                shape = tf.nest.flatten(specs)[0].shape.as_list()
                raise TrainingError(f"batches of {shape} tokens (--buckets): {error}") from error

    def _fail(self, error: tf.errors.OpError, step: int, batch: Any, graphs: Any) -> NoReturn:
        """Raises the error of a step whose graph failed."""
        # Variables on a lost worker cannot be restored.
        watch.check_workers(error)
        rescaled, explained = self.trained.take_back(error), self.trained.explain(error)
        if rescaled is None and not is_not_finite(f"{explained} {error.message}"):
            if explained is None:
                raise error
            self.give_up(str(explained), step, error)
        self._check_devices(graphs)
        if rescaled is not None:
            raise RescaledError(rescaled) from error
        if explained is None and LOSS_NOT_FINITE in error.message:
            # The value arose outside of pipelines, which check their own.
            raise NotFiniteError(LOSS_NOT_FINITE) from error
        # Locating it takes as long as the first step, so only the first of several such steps
        # is located.
        located = None if self._was_skipped else self._locate(batch)
        raise NotFiniteError(str(located or explained or NOT_FINITE)) from error

    def _check_devices(self, graphs: Any) -> None:
        """Checks after a graph's first call, also a failed one, that stages ran where they must."""
        if graphs is not None:
            Placement.of(graphs, self.trained.devices).check()

    def _prepare_evaluation(self) -> None:
        if self.sample.batches:
            self._evaluation.score(self.sample.batches[0])

    def _next_batch(self) -> Any:
        try:
            return self.batches.next()
        except DataError:
            self.saving.follow(self.batches)
            self._skip = self.batches.skip
            raise

    def _locate(self, batch: Any) -> PipemeshError | None:
        """Runs a failed step again, which changes nothing, to find where a value is not finite."""
        if not self.trained.pipelines:
            return None
        for stack in self.trained.pipelines:
            stack.locates_errors = True
        try:
            with watch.during("the search for what is not finite"), self.trained.cluster():
                tf.function(self._train_step, autograph=False)(batch)
        except tf.errors.OpError as error:
            self.trained.take_back(error)
            return self.trained.explain(error)
        finally:
            for stack in self.trained.pipelines:
                stack.locates_errors = False
        return None

    def trace_schedule(self) -> tuple[Timeline, list[tuple[Timeline, float]]]:
        """Trains six more steps with a clock: one that builds the graph, and five that are timed.

        Returns:
            The timeline predicted from the actions of the step of median length, and the measured
            timelines, that step first, with the seconds of their steps; all in milliseconds.
        """
        stack = self.trained.pipelines[0]
        stack.clock = ActionClock()
        timed = tf.function(self._train_step, autograph=False)
        plain, self._train = self._train, timed
        try:
            self._whole_step()
            timelines: list[tuple[Timeline, float]] = []
            for _ in range(_TIMED):
                seconds = self._whole_step()
                timelines.append((stack.clock.timeline(stack.schedule, unit=1e-3), seconds))
        finally:
            self._train = plain
        timelines.sort(key=lambda pair: pair[0].makespan)
        timelines.insert(0, timelines.pop(_TIMED // 2))
        measured = timelines[0][0]
        stack.clock = None
        return simulate(stack.schedule, measured.costs), timelines

    def _whole_step(self) -> float:
        """Trains a step whose gradients do not overflow; returns its seconds."""
        while True:
            begin = time.perf_counter()
            try:
                self.train_step()
            except RescaledError:
                self.skip()
            else:
                return time.perf_counter() - begin

    def evaluate(
        self, batches: Iterable[Any], stopped: Callable[[], bool] = lambda: False
    ) -> Score | None:
        """Scores held-out batches without dropout; returns None if `stopped`, which it calls before
        each batch, is True.

        Raises:
            DataError: the held-out data cannot be read.
            TrainingError: an operation of a stage failed.
        """
        try:
            return self._evaluation.of(batches, stopped)
        except TrainingError as error:
            self.give_up(str(error), self.step, error)

    def save(self) -> str:
        """Saves a checkpoint of everything; returns its path.

        Raises:
            SaveError: the checkpoint cannot be written.
            TrainingError: the held-out loss of these weights is not finite; nothing is saved.
        """
        return self.saving.save(self.step, self._note(), self._check_weights)

    def _check_weights(self) -> None:
        # A step's loss belongs to the weights before it, so the current weights are unchecked.
        batch = self.sample.batches[0] if self.sample.batches else self.batch
        score = None if batch is None else self.evaluate([batch])
        if score is not None and not np.isfinite(score.judged):
            self.give_up(f"the held-out loss is {score.judged}", self.step)

    def begin_save(self, score: float | None = None) -> None:
        """Begins to save the current state with its score, None if it was not evaluated. The next
        step shows whether the weights are good; see `Saving.begin`.
        """
        self.saving.begin(self.step, self._note(), score)

    def _note(self) -> dict[str, Any]:
        place = {"skip": self._skip, "best": self.best, "judged": self.judged}
        return {**self.subject.note(), **place}

    def skip(self) -> None:
        """Counts a failed step as finished, with unchanged weights."""
        self.trained.step.assign_add(1)
        self.trained.skipped.assign_add(1)
        self._was_skipped = True
        if self.workers:
            self.workers.end_failed_step()

    def give_up(self, what: str, step: int, error: Exception | None = None) -> NoReturn:
        """Ends the run with the last good state, by a TrainingError that names the failure."""
        self.saving.give_up()
        name = self.subject.rate_name or rates_of(self.subject.task())[1]
        hint = f"; give a lower {name}" if is_not_finite(what) else ""
        raise TrainingError(
            f"step {step}: {what}; of good checkpoints, {self.kept}{hint}"
        ) from error

    def _train_step(self, batch: Any) -> Any:
        return self.trained.train(batch, self.subject.outcome, self._tells_gradients)
