"""A training step of a model under a plan, to run and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipemesh.errors import PlanError
from pipemesh.plan import Plan
from pipemesh.recurrent import ActionClock
from pipemesh.recurrent.forecast import DeviceMemory, memory_of
from pipemesh.schedule import Action
from pipemesh.training.subject import Subject
from pipemesh.training.trained_task import TrainedTask


class TimedStep:
    """A full training step: forward, backward, all-reduce and optimizer.

    Args:
        subject: the model, with its plan.
        batch: nested tensors.
        clocked: whether to note when each action runs, which takes some time itself.

    Attributes:
        trained: the task and its variables.
        memory: forecast memory of each device, once a step has run.
        build: seconds until the first step was done.
        cpu: summed seconds of all cores in the latest step.
        before: seconds of the latest step before its first action, with a clock.
        after: seconds of the latest step after its last action, with a clock.
        noted: called with each action at its start, and with True at its end, with a clock.

    Raises:
        PlanError: the model has no pipeline, or several.
        PipemeshError: the model does not support the plan.
    """

    def __init__(self, subject: Subject, batch: Any, clocked: bool = False) -> None:
        begin = time.perf_counter()
        self.plan: Plan = subject.plan
        self._batch = batch
        task = subject.task_with_input(is_trained=True)
        self.trained = TrainedTask(task, subject.plan, subject.device_type, subject.seed)
        if len(self.trained.pipelines) != 1:
            raise PlanError(
                f"{subject.name} has {len(self.trained.pipelines)} pipelines; figures are of a "
                "model that has one"
            )
        self.stack: Any = self.trained.pipelines[0]
        self.memory: list[DeviceMemory] = []
        self.stack.noted_run = self._note
        self.noted: Callable[[Action, bool], None] | None = None
        self._clock = self.stack.clock = ActionClock(self._note_action) if clocked else None

        def step(batch: Any) -> Any:
            return self.trained.train(batch, lambda metrics, per_example: ())[0]

        self._step = tf.function(step, autograph=False)
        self.cpu = self.before = self.after = 0.0
        self.run()
        self.build = time.perf_counter() - begin

    def _note_action(self, action: Action, is_end: bool) -> None:
        if self.noted is not None:
            self.noted(action, is_end)

    def _note(self, run: Any) -> None:
        self.stack.noted_run = None
        self.memory = memory_of(run)

    def run(self) -> float:
        """Runs a step; returns its seconds, and sets `cpu` to its core time."""
        begin, cpu = time.perf_counter(), time.process_time()
        with self.trained.cluster():
            try:
                self._step(self._batch).numpy()
            except tf.errors.InvalidArgumentError as error:
                if self.trained.take_back(error) is None:
                    raise
                # A step without an update is no valid measurement.
                return self.run()
        self.cpu, end = time.process_time() - cpu, time.perf_counter()
        if self._clock:
            first, last = self._clock.span()
            self.before, self.after = first - begin, end - last
        return end - begin

    def durations(self) -> dict[Action, float]:
        """Returns the seconds of each action of the latest step, if it has a clock."""
        return self._clock.durations() if self._clock else {}
