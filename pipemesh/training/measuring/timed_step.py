"""Steps under a plan, the times of their actions and their temporary memory."""

from __future__ import annotations

from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip


import collections
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import Any, Literal

import tensorflow as tf
from lingvo.core import tshape

from pipemesh.backend.peak import TensorMemory
from pipemesh.errors import PlanError
from pipemesh.layers import PipeliningLayer
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.plan import Plan
from pipemesh.recurrent import ActionClock
from pipemesh.recurrent.forecast import DeviceMemory, memory_of
from pipemesh.schedule import Action
from pipemesh.training.lingvo_params import params_within
from pipemesh.training.subject import Subject
from pipemesh.training.trained_task import TrainedTask


class _Known(Exception):
    """Ends the trace of a step that knows what was asked for."""


class TimedStep:
    """A full training step: forward, backward, all-reduce and optimizer.

    Args:
        subject: the model and its plan.
        batch: what it is trained on.
        clocked: whether it notes when each action runs, which takes time itself.
        until: what is wanted of a step that does not run: the shapes of the first stage's `inputs`,
            or the `memory` that it holds. It is traced no further than that.
        layers: numbers of the layers that the pipeline keeps, cut at the plan's boundaries; None
            for all.
    """

    def __init__(
        self,
        subject: Subject,
        batch: Any,
        clocked: bool = False,
        until: Literal["inputs", "memory"] | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        begin = time.perf_counter()
        self.plan: Plan = subject.plan
        self._batch = batch
        task = subject.task_with_input(is_trained=True)
        if layers is not None:
            _keep_layers(task, layers, self.plan.boundaries or ())
        learns = until != "memory"
        self.trained = TrainedTask(task, subject.plan, subject.device_type, subject.seed, learns)
        if len(self.trained.pipelines) != 1:
            raise PlanError(
                f"{subject.name} has {len(self.trained.pipelines)} pipelines; figures are of a "
                "model that has one"
            )
        self.stack: Any = self.trained.pipelines[0]
        # Forecast for each device, once a step has run.
        self.memory: list[DeviceMemory] = []
        self.stack.noted_run = self._note
        self.noted: Callable[[Action, bool], None] | None = None
        # The shapes of the first stage's inputs, nested as these are, of the whole batch.
        self.shapes: tuple[Any, ...] = ()
        before = self.stack.FPropBefore

        def note(theta: Any, *args: Any) -> Any:
            outputs = before(theta, *args)
            self.shapes = tf.nest.map_structure(
                lambda x: None if x is None else tshape.Shape(x.shape.as_list()), to_tuple(outputs)
            )
            if until == "inputs":
                raise _Known
            return outputs

        self.stack.FPropBefore = note
        self._clock = self.stack.clock = ActionClock(self._note_action) if clocked else None

        def step(batch: Any) -> Any:
            return self.trained.train(batch, lambda metrics, per_example: ())[0]

        self._step = tf.function(step, autograph=False)
        # Of the latest step: core seconds, and seconds outside its first and last action.
        self.cpu = self.before = self.after = 0.0
        self._until = until
        if until is None:
            self.run()
        else:
            with self.trained.cluster(), contextlib.suppress(_Known):
                self._step.get_concrete_function(batch)
        self.build = time.perf_counter() - begin

    def _note_action(self, action: Action, is_end: bool) -> None:
        if self.noted is not None:
            self.noted(action, is_end)

    def _note(self, run: Any) -> None:
        self.stack.noted_run = None
        self.memory = memory_of(run)
        if self._until == "memory":
            raise _Known

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


def _keep_layers(task: Any, kept: Collection[int], boundaries: Sequence[int]) -> None:
    """Takes all but some layers out of the params of a task's pipelines, and cuts these."""
    for stack in params_within(task, PipeliningLayer):
        layers = [layer for cell in stack.cell_tpl for layer in cell.sub]
        if len(stack.cell_tpl) != len(boundaries) - 1:
            raise PlanError(
                f"{stack.name} has {len(stack.cell_tpl)} stages where its plan has "
                f"{len(boundaries) - 1}; let Task() make as many as self.PLAN.num_stages says"
            )
        for cell, (begin, end) in zip(stack.cell_tpl, itertools.pairwise(boundaries), strict=True):
            cell.sub = [layers[i] for i in range(begin, end) if i in kept]
        left = {layer.name for i, layer in enumerate(layers) if i not in kept}
        stack.tied_weights = {
            taker: giver
            for taker, giver in stack.tied_weights.items()
            if taker.partition(".")[0] not in left
        }


_THREADS = "/proc/self/task"


@contextlib.contextmanager
def one_core() -> Iterator[bool]:
    """Pins all threads of this process to one core; yields False where that is impossible."""
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
"""How often each step is run, unless that takes longer than `SECONDS`."""
SECONDS, _FEW = 8.0, 6


def rounds(number: int, seconds: float = SECONDS) -> Iterator[int]:
    """Yields up to so many numbers, and after so many seconds no more than the first few."""
    end = time.monotonic() + seconds
    for count in range(number):
        if count >= _FEW and time.monotonic() > end:
            return
        yield count


# Lower bound of a layer's share of its action's time.
_LEAST = 0.1


class ActionTimes:
    """The times of actions in several clocked steps, each layer a stage, against a step with all
    layers in one stage (`whole`).
    """

    def __init__(
        self, steps: Sequence[TimedStep], rows: Sequence[int], number: int, whole: TimedStep
    ) -> None:
        self._number = number
        # Seconds of actions by layer, kind and rows, and of those of all layers by kind.
        self._alone: dict[tuple[int, str, int], list[float]] = collections.defaultdict(list)
        self._together: dict[str, list[float]] = collections.defaultdict(list)
        before: list[float] = []
        after: list[float] = []
        # Steps run in turn, so that other load slows all of them equally.
        for _ in rounds(ROUNDS):
            for step, size in zip(steps, rows, strict=True):
                step.run()
                before.append(step.before)
                after.append(step.after)
                times = _later(step)
                # With recomputation only R is counted: it takes work off the other actions.
                again = any(action.kind == "R" for action, _ in times)
                for action, seconds in times:
                    if action.kind == "R" or not again:
                        self._alone[action.stage, action.kind, size].append(seconds)
            whole.run()
            for action, seconds in _later(whole):
                self._together[action.kind].append(seconds)
        # Seconds of a step until its first action, and after its last one.
        self.before, self.after = statistics.median(before), statistics.median(after)

    def besides(self, rows: int) -> float:
        """Returns the overhead of an action: one of all layers against one for each layer."""
        if self._number == 1:
            return 0.0
        layers = self.of_layers(0.0)
        more = [
            (sum(times[kind][rows] for times in layers) - usual(self._together[kind]))
            / (self._number - 1)
            for kind in "FB"
        ]
        return max(0.0, min(more))

    def of_layers(self, beside: float) -> list[dict[str, dict[int, float]]]:
        """Returns each layer's seconds without `beside`, by kind of action and rows."""
        layers: list[dict[str, dict[int, float]]] = [{} for _ in range(self._number)]
        for (layer, kind, size), times in self._alone.items():
            seconds = usual(times)
            by_rows = layers[layer].setdefault(kind, {})
            by_rows[size] = max(seconds - beside, _LEAST * seconds)
        # A first layer without weights has no backward pass.
        for kinds in layers:
            for kind in "BR":
                kinds.setdefault(kind, dict.fromkeys(kinds["F"], 0.0))
        return layers


def _later(step: TimedStep) -> list[tuple[Action, float]]:
    """Returns the actions from the second microbatch on, which add to existing gradients."""
    return [(action, seconds) for action, seconds in step.durations().items() if action.microbatch]


def in_turn(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns the typical time of each of several things that run in turn, for some rounds."""
    # A slow phase of the machine lengthens a whole round: divide times by their round's.
    totals = [sum(times) for times in rounds]
    whole = statistics.median(totals)
    return [
        whole
        * statistics.median(seconds / total for seconds, total in zip(times, totals, strict=True))
        for times in zip(*rounds, strict=True)
    ]


def usual(seconds: Sequence[float]) -> float:
    """Returns the typical time: the mean of the shorter half, as other load only lengthens times
    and the shortest alone is luck.
    """
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


# The order of independent operations changes from step to step.
_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class WorkingMemory:
    """Temporary memory of a step on one device, in bytes."""

    # The peak of an action of each stage, less the bytes held at its start or end, whichever is
    # more.
    stages: tuple[int, ...]
    # After the last action, beside weights and optimizer state.
    update: int


def working_memory(step: TimedStep) -> WorkingMemory | None:
    """Returns the temporary memory of a clocked step on one device; None if it is not counted."""
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
        # An action without operations may have no start; the first microbatch allocates the sums
        # of gradients.
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
