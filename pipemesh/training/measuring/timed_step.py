"""Steps under a plan, the times of their actions and their temporary memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import tensorflow as tf

from pipemesh.backend.peak import TensorMemory
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


_THREADS = "/proc/self/task"


@contextlib.contextmanager
def one_core() -> Iterator[bool]:
    """Pins all threads of this process to one core; yields False if the system cannot (not Linux).

    New threads inherit the core. At the end all threads get all cores of the process back.

    Example:
        >>> import os, sys
        >>> with one_core() as is_one:
        ...     len(os.sched_getaffinity(0)) == 1 if is_one else sys.platform != "linux"
        True
    """
    if sys.platform != "linux" or not os.path.isdir(_THREADS):
        yield False
        return
    cores = os.sched_getaffinity(0)
    _place({min(cores)})
    try:
        yield True
    finally:
        _place(cores)


def _place(cores: Set[int]) -> None:
    if sys.platform == "linux":
        for thread in map(int, os.listdir(_THREADS)):
            # The thread may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


ROUNDS = 20
"""How often each step is run."""

# Lower bound of a layer's share of its action's time.
_LEAST = 0.1


class ActionTimes:
    """The times of actions in several steps that run in turn.

    Args:
        steps: steps with a clock, each layer a stage.
        rows: number of examples in a microbatch, for each step.
        number: number of layers.
        whole: a step with a clock and all layers in one stage.
    """

    def __init__(
        self,
        steps: Sequence[TimedStep],
        rows: Sequence[int],
        number: int,
        whole: TimedStep,
    ) -> None:
        self._steps, self._rows, self._whole = steps, rows, whole
        self._layers: list[dict[str, dict[int, list[float]]]] = [{} for _ in range(number)]
        self._together: dict[str, list[float]] = {}
        self._before: list[float] = []
        self._after: list[float] = []

    def add(self) -> None:
        """Runs each step once, in turn, so that other load slows all of them equally."""
        for step, size in zip(self._steps, self._rows, strict=True):
            step.run()
            self._before.append(step.before)
            self._after.append(step.after)
            times = _later(step)
            # With recomputation only R is counted: it takes work off the other actions.
            again = any(action.kind == "R" for action, _ in times)
            for action, took in times:
                if again and action.kind != "R":
                    continue
                own = self._layers[action.stage].setdefault(action.kind, {})
                own.setdefault(size, []).append(took)
        self._whole.run()
        for action, took in _later(self._whole):
            self._together.setdefault(action.kind, []).append(took)

    @property
    def before(self) -> float:
        """Returns the seconds of a step until its first action."""
        return statistics.median(self._before)

    @property
    def after(self) -> float:
        """Returns the seconds of a step after its last action."""
        return statistics.median(self._after)

    def besides(self, rows: int) -> float:
        """Returns the overhead of an action, from one action of all layers against one for each
        layer.
        """
        if len(self._layers) == 1:
            return 0.0
        every = self.of_layers(0.0)
        more = [
            (sum(own[kind][rows] for own in every) - usual(self._together[kind])) / (len(every) - 1)
            for kind in "FB"
        ]
        return max(0.0, min(more))

    def of_layers(self, beside: float) -> list[dict[str, dict[int, float]]]:
        """Returns each layer's seconds without `beside`, by kind of action and rows."""

        def without(times: list[float]) -> float:
            took = usual(times)
            return max(took - beside, _LEAST * took)

        found = [
            {kind: {size: without(times) for size, times in of.items()} for kind, of in own.items()}
            for own in self._layers
        ]
        # A first layer without weights has no backward pass.
        for own in found:
            for kind in "BR":
                own.setdefault(kind, dict.fromkeys(own["F"], 0.0))
        return found


def _later(step: TimedStep) -> list[tuple[Action, float]]:
    """Returns the actions from the second microbatch on, which add to existing gradients."""
    return [(action, took) for action, took in step.durations().items() if action.microbatch]


def times_of(
    steps: Sequence[TimedStep], rows: Sequence[int], number: int, whole: TimedStep
) -> ActionTimes:
    """Returns the times of steps, each of which runs `ROUNDS` times."""
    found = ActionTimes(steps, rows, number, whole)
    for _ in range(ROUNDS):
        found.add()
    return found


def on_one_core(
    steps: Sequence[TimedStep],
    rows: Sequence[int],
    number: int,
    whole: TimedStep,
) -> ActionTimes | None:
    """Returns the times of steps on one core, or None if the process cannot be pinned.

    On one core, time is the work that all cores would share.
    """
    with one_core() as is_one:
        if not is_one:
            return None
        return times_of(steps, rows, number, whole)


def in_turn(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns the typical time of each of several things that run in turn, for some rounds.

    A slow phase of the machine lengthens a whole round. So times are first divided by their
    round's.

    Example:
        >>> in_turn([(1.0, 3.0), (2.0, 6.0), (1.0, 3.0)])
        [1.0, 3.0]
    """
    totals = [sum(times) for times in rounds]
    whole = statistics.median(totals)
    return [
        whole * statistics.median(took / total for took, total in zip(times, totals, strict=True))
        for times in zip(*rounds, strict=True)
    ]


def usual(seconds: Sequence[float]) -> float:
    """Returns the typical time among several: the mean of the shorter half.

    Other load only lengthens times, and the shortest time alone is luck.

    Example:
        >>> usual([3.0, 1.0, 9.0, 2.0, 7.0])
        2.0
    """
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


# The order of independent operations changes from step to step.
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class WorkingMemory:
    """Temporary memory of a step on one device.

    Attributes:
        stages: for each stage the peak bytes of one of its actions, less the bytes held at its
            start or end, whichever is more.
        update: peak bytes after the last action, beside weights and optimizer state.
    """

    stages: tuple[int, ...]
    update: int


def working_memory(step: TimedStep) -> WorkingMemory | None:
    """Returns the temporary memory of a step with a clock, or None if TensorFlow does not count it.

    The step needs one device and at least two microbatches. The first microbatch is left out, as it
    allocates the gradient sums.
    """
    memory = TensorMemory(step.trained.all_devices()[0])
    if not memory.is_counted:
        return None
    held: dict[Action, int] = {}
    most = [0] * step.plan.num_stages
    update = 0

    def note(action: Action, is_end: bool) -> None:
        now, peak = memory.current, memory.peak
        memory.forget_peak()
        if not is_end:
            held[action] = now
        # An action without operations may have no start.
        elif action.microbatch and action in held:
            needed = peak - max(held[action], now)
            most[action.stage] = max(most[action.stage], needed)

    step.noted = note
    try:
        for _ in range(_ROUNDS):
            before = memory.current
            memory.forget_peak()
            step.run()
            # The peak since the last action ended.
            update = max(update, memory.peak - before)
    finally:
        step.noted = None
    return WorkingMemory(tuple(most), update)
